"""The contract of a strategy."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from flockstep.arrays.schema import slices
from flockstep.codecs.base import Codec
from flockstep.errors import CompositionError
from flockstep.expression import Component
from flockstep.messages import Notes
from flockstep.nodes import Server, Worker
from flockstep.strategies.traits import Clips as Clips
from flockstep.strategies.traits import ResultPolicy as ResultPolicy
from flockstep.strategies.traits import Traits as Traits

Optimisation = Literal["central", "decentral"]
Scheduling = Literal["sync", "bounded async", "soft-bounded async", "async"]
Exchange = Literal[
    "none", "scatter-reduce", "reduce", "2:1 reduce", "binomial tree", "all-reduce", "ad hoc",
    "ad hoc with eager scatter",
]  # fmt: skip
Places = Literal[
    "none", "single PS", "distributed PS", "distributed PS (k = n)", "hierarchical PS", "replicated PS",
    "shared memory", "closed ring", "graph", "tree", "p2p mesh", "dedicated master",
]  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """Where a composed strategy stands in the taxonomy of Langer et al. (2020, section 3 and table 1)."""

    optimisation: Optimisation
    """Central: gradients are exchanged and one model is optimised; decentral: replicas are, and exchange parameters."""
    scheduling: Scheduling
    exchange: Exchange
    topology: Places


class Strategy(Component):
    """When to exchange, with whom, what, and how the result is applied: one coroutine per role.

    A program that must remember something between steps keeps it in the state object it is handed
    (`me.state`), never in a local: restarted with its state at a step boundary it continues bit for bit.
    """

    noun: ClassVar[str] = "strategy"
    notes: ClassVar[Notes] = {}
    """What travels beside arrays: tag ("push", "push/channel"), or "reply to push", → the kind of note of the messages
    with that tag."""

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """What this strategy promises; checks and drivers read these, never a name."""

    @property
    def cell(self) -> Cell | None:
        """Its cell of the taxonomy; None for what has no place there."""
        return None

    @property
    def servers(self) -> int:
        """Number of servers that run `master`; server i of k holds the i-th of k slices of the parameters."""
        return 0

    def servers_for(self, workers: int) -> int:
        """The same where it depends on the number of workers."""
        return self.servers

    @property
    def coding(self) -> Codec | None:
        """The codec whose arithmetic a worker's step takes, which need not be what travels; None: there is none."""
        return getattr(self, "codec", None)

    def decodes(self, workers: int) -> int:
        """How many times a worker decodes the whole model in a step."""
        return 0 if self.servers_for(workers) else 1 if self.coding is None or self.coding.linear else workers

    def held(self, workers: int, size: int) -> list[slice]:
        """For each server, which of the `size` parameters it holds; where two hold the same, the first one's count."""
        count = self.servers_for(workers)
        return slices(size, count) if count else []

    def check(self, workers: int) -> None:
        """Raise `ConfigurationError` unless this strategy can run on that many workers."""

    def worker_state(self, me: Worker) -> Any:
        """The state object of a worker's program before its first step."""
        return None

    def master_state(self, me: Server) -> Any:
        """The state object of a server's program before its first message."""
        return None

    @abstractmethod
    async def worker(self, me: Worker) -> None:
        """The program of a worker, up to its last gradient."""

    async def finish(self, me: Worker) -> None:
        """What a worker does after its last gradient: hand over what is still held back, then leave."""
        me.leave()

    async def master(self, me: Server) -> None:
        """The program of a server, until every worker has left."""
        raise CompositionError(f"{self} has no server")


def choose_result(strategy: Strategy, wanted: ResultPolicy | None) -> ResultPolicy:
    """The policy that picks the resulting model.

    Raises:
        CompositionError: `wanted` makes no sense for this strategy.
    """
    results = strategy.traits.results
    if wanted is None:
        return results[0]
    if wanted not in results:
        raise CompositionError(
            f"result must be one of {', '.join(results)} for {strategy}, got {wanted}; leave it out for {results[0]}"
        )
    return wanted
