"""Elastic averaging between the neighbours in a tree of workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from flockstep.errors import ConfigurationError
from flockstep.expression import searched
from flockstep.messages import Message
from flockstep.nodes import Worker
from flockstep.strategies.base import Cell, Strategy, Traits


@dataclass(frozen=True)
class TreeElasticAveraging(Strategy):
    """EASGD Tree (Zhang 2016, chapter 6): every node of a tree is a worker that meets its parent and its children.

    Worker i > 0 is a child of (i - 1) div branching, as in the topology `tree`. A leaf sends its parameters to its
    parent every `up` steps and hears its parent every `down` steps; between inner nodes both happen every `upper`
    steps. On receipt of x, at the next step boundary, w ← w - alpha (w - x), whatever became of the sender meanwhile.
    `alpha` none: 0.9 / (branching + 1). The thesis has branching 16 with 256 workers, periods 10 and 100. When a
    worker dies, its children turn to its parent; those of worker 0 go on as trees of their own.
    """

    branching: int = 4
    up: int = field(default=10, metadata=searched(1, 64))
    down: int = field(default=10, metadata=searched(1, 64))
    upper: int = 100
    alpha: float | None = None

    def __post_init__(self) -> None:
        if self.branching < 1:
            raise ConfigurationError(f"branching must be >= 1, got {self.branching}; use 2 for a binary tree")
        for name in ("up", "down", "upper"):
            if getattr(self, name) < 1:
                raise ConfigurationError(
                    f"{name} must be >= 1 steps, got {getattr(self, name)}; 10 is usual next to leaves, 100 above"
                )
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise ConfigurationError(
                f"alpha must be in [0, 1], got {self.alpha}; leave it out for 0.9 / (branching + 1)"
            )

    # A worker hears its neighbours only; workers may die.
    traits = Traits(completeness=4, survives=True, results=("mean", "rank0", "best"))
    cell = Cell("decentral", "bounded async", "ad hoc", "tree")

    @property
    def rate(self) -> float:
        """alpha; unless it is given, 0.9 / (branching + 1)."""
        return 0.9 / (self.branching + 1) if self.alpha is None else self.alpha

    async def worker(self, me: Worker) -> None:
        """Move towards what came, step, tell those whose turn it is."""
        while me.training:
            for message in me.arrived("model"):
                self.approach(me, message)
            me.optimizer_step(await me.gradient())
            me.send_all(self.due(me), "model", me.params)

    async def finish(self, me: Worker) -> None:
        """Move towards what is still to come."""
        me.leave(peers=True)
        async for message in me.messages():
            if message.tag == "model":
                self.approach(me, message)

    def approach(self, me: Worker, message: Message) -> None:
        """w ← w - alpha (w - x)."""
        me.params -= self.rate * (me.params - message.payload)
        me.record_update(message.source, max(0, me.step - message.step))

    def due(self, me: Worker) -> list[int]:
        """The neighbours that hear of this worker after the step that it has just taken."""
        if me.step % self.up and me.step % self.down and me.step % self.upper:
            return []
        parent = self.parent(me.rank, me.lost)
        edges = [] if parent is None else [(parent, me.rank, self.up)]
        edges += [(child, child, self.down) for child in self.children(me.rank, me.workers, me.lost)]
        leaf = self.is_leaf
        return [to for to, lower, period in edges if not me.step % (period if leaf(lower, me.workers) else self.upper)]

    def is_leaf(self, rank: int, workers: int) -> bool:
        """Whether that worker has no children where everyone is alive."""
        return self.branching * rank + 1 >= workers

    def parent(self, rank: int, lost: set[int]) -> int | None:
        """The nearest ancestor that is alive."""
        while rank > 0:
            rank = (rank - 1) // self.branching
            if rank not in lost:
                return rank
        return None

    def children(self, rank: int, workers: int, lost: set[int]) -> list[int]:
        """The workers whose nearest living ancestor this one is."""
        others = range(rank + 1, workers)
        return [other for other in others if other not in lost and self.parent(other, lost) == rank]
