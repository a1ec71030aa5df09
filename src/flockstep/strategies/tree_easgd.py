"""EASGD Tree: elastic averaging between parents and children in a tree of workers."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.errors import ConfigurationError, require
from flockstep.messages import Message
from flockstep.nodes import Worker
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits
from flockstep.strategies.resizing import Resizing


@dataclass(frozen=True)
class TreeElasticAveraging(Strategy):
    """EASGD Tree (Zhang 2016, chapter 6): every node of a tree is a worker that exchanges parameters with its parent
    and its children.

    Worker i > 0 is a child of worker (i - 1) div branching, as in the topology `tree`. A leaf sends its parameters to
    its parent every `up` steps, and the parent sends its parameters to the leaf every `down` steps; inner nodes
    exchange in both directions every `upper` steps. A worker that has received x moves at its next step boundary: w ← w
    - alpha (w - x). `alpha` is 0.9 / (branching + 1) by default. The thesis uses branching 16 with 256 workers, and
    periods 10 and 100. If a worker dies, its children exchange with its parent; the children of worker 0 continue as
    separate trees.
    """

    branching: int = 4
    up: int = 10
    down: int = 10
    upper: int = 100
    alpha: float | None = None

    def __post_init__(self) -> None:
        require(self.branching >= 1, "branching", ">= 1", self.branching, "use 2 for a binary tree")
        for name in ("up", "down", "upper"):
            if getattr(self, name) < 1:
                raise ConfigurationError(
                    f"{name} must be >= 1 steps, got {getattr(self, name)}; use 10 for exchanges with leaves, 100 "
                    f"for other exchanges"
                )
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise ConfigurationError(
                f"alpha must be in [0, 1], got {self.alpha}; leave it out for 0.9 / (branching + 1)"
            )

    # A worker exchanges with its neighbors only; workers may die.
    traits = Traits(delivery="partial", survives=True, results=("mean", "rank0", "best"))
    taxonomy_entry = TaxonomyEntry("decentral", "bounded async", "ad hoc", "tree")

    @property
    def rate(self) -> float:
        """The elastic rate alpha, by default 0.9 / (branching + 1)."""
        return 0.9 / (self.branching + 1) if self.alpha is None else self.alpha

    resizing = Resizing(replicas="own")

    async def worker(self, me: Worker) -> None:
        while me.training:
            for message in me.arrived("model"):
                self.approach(me, message)
            me.optimizer_step(await me.gradient())
            me.send_all(self.due(me), "model", me.params)

    async def finish(self, me: Worker) -> None:
        """Leave the run, and move toward the models that are still in transit."""
        me.leave(peers=True)
        async for message in me.messages():
            if message.tag == "model":
                self.approach(me, message)

    def approach(self, me: Worker, message: Message) -> None:
        """Move the worker's model w toward a received model x: w ← w - alpha (w - x)."""
        me.params -= self.rate * (me.params - message.payload)
        me.record_update(message.source, max(0, me.step - message.step))

    def due(self, me: Worker) -> list[int]:
        """Return the ranks of the neighbors in the tree to which this worker sends its model after the step that it has
        just taken.
        """
        if me.step % self.up and me.step % self.down and me.step % self.upper:
            return []
        parent = self.parent(me.rank, me.lost)
        edges = [] if parent is None else [(parent, me.rank, self.up)]
        edges += [(child, child, self.down) for child in self.children(me.rank, me.workers, me.lost)]
        leaf = self.is_leaf
        return [to for to, lower, period in edges if not me.step % (period if leaf(lower, me.workers) else self.upper)]

    def is_leaf(self, rank: int, workers: int) -> bool:
        """Return whether the worker `rank` has no children while all workers are alive."""
        return self.branching * rank + 1 >= workers

    def parent(self, rank: int, lost: set[int]) -> int | None:
        """Return the rank of the nearest ancestor in the tree that is alive; None if no ancestor is alive."""
        while rank > 0:
            rank = (rank - 1) // self.branching
            if rank not in lost:
                return rank
        return None

    def children(self, rank: int, workers: int, lost: set[int]) -> list[int]:
        """Return the ranks of the live workers whose nearest live ancestor is this worker."""
        others = range(rank + 1, workers)
        return [other for other in others if other not in lost and self.parent(other, lost) == rank]
