"""Gradient coding: workers compute redundant gradients, coded so that any n - s of n workers determine the exact
sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from flockstep.arrays.namespace import namespace
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, PeerLost, require
from flockstep.messages import LEAVE, MASTER, Message, Note, Notes
from flockstep.nodes import Server, Worker
from flockstep.strategies.base import ResultPolicy, Strategy, TaxonomyEntry, Traits, check_replicas

Code = npt.NDArray[np.float64]


class Coded(Note, frozen=True):
    """Note sent with a coded gradient: the step, and the learning rate."""

    turn: int
    lr: float


@dataclass
class Round:
    """The server's state: rank → coded gradient of the current step, and the ranks of dead workers."""

    arrived: dict[int, FlatArray] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class GradientCoding(Strategy):
    """Gradient coding (Tandon, Lei, Dimakis & Karampatziakis 2017), against `s` stragglers or deaths.

    The data is divided into n blocks. Worker i computes the gradients of s + 1 blocks and sends one coded sum. The
    server decodes the exact mean from the first n - s sums that arrive, steps, and sends the parameters to all workers;
    the stragglers then cancel their gradients. With `fractional` (n a multiple of s + 1), groups of s + 1 workers hold
    the same blocks and send their plain sum, so that no bit of the result depends on which workers are late. With
    `cyclic` (any n), worker i holds blocks i, …, i + s with coefficients from a random matrix whose rows sum to zero
    (the paper's algorithm 2). `replicas` is the number of backups of the server.
    """

    notes: ClassVar[Notes] = {"coded": Coded}

    s: int = 1
    scheme: Literal["fractional", "cyclic"] = "fractional"
    replicas: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_replicas(self.replicas)
        require(self.s >= 0, "s", ">= 0 stragglers", self.s, "use 0 for no redundancy")

    @property
    def traits(self) -> Traits:
        """The strategy's traits: synchronous delivery; up to s workers may die, because each block of data is held by s
        + 1 workers.
        """
        results: tuple[ResultPolicy, ...] = ("server", "mean", "rank0")
        return Traits(
            "synchronous",
            self.s,
            results,
            True,
            needs_job=True,
            samples="others" if self.s else "own",
            plain_gradients=False,
        )

    taxonomy_entry = TaxonomyEntry("central", "sync", "reduce", "single PS")
    servers = 1

    def check(self, workers: int) -> None:
        """Check that s < workers, and that a fractional code divides the workers into whole groups.

        Raises:
            ConfigurationError: s is too large, or the number of workers is not a multiple of s + 1.
        """
        require(self.s < workers or workers <= 1, "s", f"below {workers}, the number of workers", self.s, "use s=1")
        if self.scheme == "fractional" and workers > 1 and workers % (self.s + 1):
            raise ConfigurationError(
                f"fractional coding needs a multiple of s + 1 = {self.s + 1} workers, got {workers}; use scheme=cyclic"
            )

    def master_state(self, me: Server) -> Round:
        return Round()

    async def worker(self, me: Worker) -> None:
        """Compute the gradients of the worker's blocks, send their coded sum, and receive the new parameters. If newer
        parameters arrive first, cancel the gradients.
        """
        row = code(self.scheme, me.workers, self.s)[me.rank]
        blocks = [int(j) for j in np.flatnonzero(row)]
        while me.training:
            turn, coded = me.step, namespace(me.params).full_like(me.params, -0.0)
            got: FlatArray | Message = coded
            for block in blocks:
                got = await me.gradient_of(block, turn, last=block == blocks[-1], unless="fresh")
                if isinstance(got, Message):
                    break
                coded += float(row[block]) * got
            else:
                me.send(MASTER, "coded", coded, Coded(turn, me.lr))
                got = await me.receive("fresh")
            assert isinstance(got, Message)
            me.params[:] = got.payload

    async def master(self, me: Server) -> None:
        """Decode the mean gradient of each step from the first n - s coded gradients, take the step, and send the
        parameters to all workers. Drop later gradients of the step.
        """
        state: Round = me.state
        n, s = me.cluster.workers, min(self.s, me.cluster.workers - 1)
        async for message in me.messages():
            if message.tag == LEAVE and message.source in me.lost:
                state.gone.add(message.source)
                if len(state.gone) > s:
                    raise PeerLost(
                        f"{len(state.gone)} workers are lost, but gradient coding with s={s} tolerates only {s}; "
                        "raise s"
                    )
            if message.tag != "coded" or message.note.turn != me.version:
                continue
            state.arrived[message.source] = message.payload
            if len(state.arrived) == n - s:
                ranks = sorted(state.arrived)
                total = namespace(me.params).full_like(me.params, -0.0)
                for rank, weight in zip(ranks, decoder(self.scheme, n, s, tuple(ranks)), strict=True):
                    if weight:
                        total += weight * state.arrived[rank]
                for rank in range(n):
                    me.record_update(rank, 0)
                me.update(total / n, message.note.lr)
                state.arrived = {}
                me.send_all([rank for rank in range(n) if rank not in state.gone], "fresh", me.params)


@lru_cache(maxsize=32)
def code(scheme: Literal["cyclic", "fractional"], n: int, s: int) -> Code:
    """Return the n × n code matrix B, with which worker i sends Σ_j B[i, j] g_j over its s + 1 blocks j."""
    s = min(s, n - 1)
    if scheme == "fractional":
        return np.kron(np.eye(n // (s + 1)), np.ones((s + 1, s + 1))).astype(np.float64)
    b = np.eye(n)
    if s:
        h = np.random.default_rng(np.random.SeedSequence((n, s))).normal(size=(s, n))
        h[:, -1] = -h[:, :-1].sum(axis=1)
        for i in range(n):
            rest = (i + 1 + np.arange(s)) % n
            b[i, rest] = -np.linalg.solve(h[:, rest], h[:, i])
    return b


@lru_cache(maxsize=4096)
def decoder(scheme: Literal["cyclic", "fractional"], n: int, s: int, survivors: Sequence[int]) -> tuple[float, ...]:
    """Return the decoding weights a, one for each surviving worker in order of rank, with Σ_i a_i B[i] = (1, …, 1).

    Raises:
        PeerLost: fewer than n - s workers survive.
    """
    if len(survivors) < n - s:
        raise PeerLost(
            f"{n - len(survivors)} of {n} workers are missing, but the code with s={s} tolerates only {s}; raise s"
        )
    if scheme == "fractional":
        groups = [rank // (s + 1) for rank in survivors]
        return tuple(float(groups.index(group) == i) for i, group in enumerate(groups))
    b = code(scheme, n, s)[list(survivors)]
    return tuple(np.linalg.lstsq(b.T, np.ones(n), rcond=None)[0].tolist())
