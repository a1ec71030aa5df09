"""PowerSGD: all-reduce of low-rank factors that approximate the gradient's matrices."""

from __future__ import annotations

from dataclasses import dataclass, field

from flockstep.arrays import kernels
from flockstep.arrays.namespace import cast, namespace
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Codec
from flockstep.codecs.low_rank import LowRank
from flockstep.codecs.power import PowerSgdCodec
from flockstep.collectives.base import Collective
from flockstep.collectives.by_host import ByHost
from flockstep.errors import CompositionError, require
from flockstep.feedback.base import Feedback
from flockstep.feedback.nothing import NoFeedback
from flockstep.feedback.residual import Residual
from flockstep.nodes import Worker
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits
from flockstep.strategies.resizing import Resizing

START = 0x50574552
"""Seed of the first matrices Q, which are equal on all workers."""


@dataclass
class PowerSgdState:
    """A worker's state: the matrices Q of the last step, equal on all workers, and the error (K,) of the worker's
    approximated gradient.
    """

    right: FlatArray
    error: FlatArray


@dataclass(frozen=True)
class PowerSgd(Strategy):
    """PowerSGD (Vogels, Karimireddy & Jaggi 2019, algorithms 1 and 2): an all-reduce of low-rank factors.

    Every tensor of more than one dimension is a matrix M (n, m), whose rows are its first dimension. Each worker adds
    its error of earlier steps to its gradient, P ← M Q is all-reduced and orthonormalized, Q ← Mᵀ P is all-reduced to
    its mean, and the job's optimizer steps with P Qᵀ. The new error is M minus the worker's own P (Mᵀ P)ᵀ, as in the
    paper; the authors' code uses the mean Q. One-dimensional tensors, and matrices no larger than their factors, are
    averaged unchanged. The `rank`(n + m) elements of a matrix are sent as float32, or as float64 for float64 gradients.
    With `warm_start`, a step starts from the last Q; otherwise, every step draws a new random Q, the same on all
    workers. `feedback=none` discards the error.
    """

    rank: int = 2
    warm_start: bool = True
    feedback: Feedback = field(default_factory=Residual)
    collective: Collective = field(default_factory=ByHost)

    def __post_init__(self) -> None:
        require(self.rank >= 1, "rank", ">= 1", self.rank, "the paper uses 1 to 4")
        if self.feedback not in (Residual(), NoFeedback()):
            raise CompositionError(
                "feedback of powersgd must be residual or none, because powersgd computes the error between two "
                f"exchanges, got {self.feedback}; leave it out for residual"
            )

    # Synchronous: a dead worker stops all workers.
    traits = Traits(
        delivery="synchronous",
        survives=False,
        results=("rank0", "mean"),
        clips="combined",
        approximation="sent later",
        matrices=True,
    )
    taxonomy_entry = TaxonomyEntry("central", "sync", "all-reduce", "replicated PS")

    @property
    def coding(self) -> Codec:
        """The codec that computes the two low-rank factors of every matrix."""
        return PowerSgdCodec(self.rank)

    def decodes(self, workers: int) -> int:
        """Return 2, because a worker multiplies out two products per step: that of its own factors, to find its error,
        and that of the mean factors.
        """
        return 2

    resizing = Resizing(own=("error",), common=("right",))

    def worker_state(self, me: Worker) -> PowerSgdState:
        """Return a state with a random Q, the same on all workers, and a zero error."""
        flat = kernels.of(me.params).as_floats(me.params)
        return PowerSgdState(self._random(flat, LowRank(me.shapes(), self.rank), 0), namespace(flat).zeros_like(flat))

    async def worker(self, me: Worker) -> None:
        layout = LowRank(me.shapes(), self.rank)
        while me.training:
            gradient = await me.gradient()
            flat = kernels.of(gradient).as_floats(gradient)
            await self._average(me, layout, flat)
            me.record_round()
            me.optimizer_step(cast(flat, kernels.name_of(gradient), copy=False))

    async def _average(self, me: Worker, layout: LowRank, flat: FlatArray) -> None:
        """Replace `flat` (K,) with the approximation of the mean over all workers; all workers get the same bits."""
        state: PowerSgdState = me.state
        if self.feedback != NoFeedback():
            flat += state.error
        matrices = [flat[m.part].reshape(m.rows, m.columns) for m in layout.matrices]
        start = state.right if self.warm_start else self._random(flat, layout, me.run_step)
        starts = self._columns(start, layout.rights)
        lefts = [m @ q for m, q in zip(matrices, starts, strict=True)]
        xp = namespace(flat)
        first = xp.concatenate([*(left.reshape(-1) for left in lefts), *(flat[part] for part in layout.dense)])
        await self.collective.average(me, first)
        lefts = [kernels.of(flat).orthonormal(p) for p in self._columns(first, layout.lefts)]
        state.right = xp.concatenate([flat[:0], *((m.T @ p).reshape(-1) for m, p in zip(matrices, lefts, strict=True))])
        if self.feedback != NoFeedback():
            state.error[:] = flat
            self._decompress(layout, lefts, -state.right, state.error)
            for part in layout.dense:
                state.error[part] = 0
        if matrices:
            await self.collective.average(me, state.right)
        flat[:] = 0
        self._decompress(layout, lefts, state.right, flat)
        taken = len(first) - layout.dense_size
        for part in layout.dense:
            flat[part] = first[taken : taken + part.stop - part.start]
            taken += part.stop - part.start

    def _columns(self, factors: FlatArray, parts: list[slice]) -> list[FlatArray]:
        """Return views of the concatenated factors as matrices of shape (n, rank) or (m, rank)."""
        return [factors[part].reshape(-1, self.rank) for part in parts]

    def _decompress(self, layout: LowRank, lefts: list[FlatArray], rights: FlatArray, out: FlatArray) -> None:
        """Add P Qᵀ of every matrix to `out` (K,)."""
        for m, p, q in zip(layout.matrices, lefts, self._columns(rights, layout.rights), strict=True):
            kernels.of(out).add_product(p, q, out[m.part])

    def _random(self, like: FlatArray, layout: LowRank, step: int) -> FlatArray:
        """Return all Q concatenated, drawn from a standard normal distribution, the same on every worker."""
        columns = sum(m.columns for m in layout.matrices)
        drawn: FlatArray = kernels.of(like).gaussian(like, columns, self.rank, (START, step)).reshape(-1)
        return drawn
