"""Two levels of servers: leaves that each collect for a group of workers, and a root that collects for the leaves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from flockstep.arrays.schema import slices
from flockstep.errors import CompositionError, ConfigurationError
from flockstep.expression import SHOWN, WORKERS, searched
from flockstep.messages import BYE, MASTER, Address, Notes, server
from flockstep.nodes import Server, Worker
from flockstep.strategies.access import Pushed
from flockstep.strategies.base import Cell, Clips, ResultPolicy, Strategy, Traits
from flockstep.strategies.server_tree import NOTES, LeafState, RootState, serve_leaf, serve_root

Level = Literal["synchronous", "asynchronous"]


@dataclass
class ReadState:
    """What a worker remembers: the version of the root that it has read."""

    version: int = 0


@dataclass(frozen=True)
class Hierarchical(Strategy):
    """Two-level parameter server (MXNet: Chen et al. 2015, section 3.2; Rudra-adv: Gupta et al. 2016, section 3.3).

    Server 0 is the root; every other server is the leaf of at most `group` workers, in order of rank. A leaf adds up as
    many gradients as it has workers and passes the sum on; the root steps the job's optimiser along the mean and
    answers with the parameters. So the root sends and receives 1/`group` of a single server's bytes.

    Synchronous leaves take one gradient of each worker, in order of rank; the workers wait for the root's answer.
    Asynchronous ones take whatever comes and answer a worker at once with the parameters that they hold: a cache that
    is written back, and refreshed, with every sum. A synchronous root takes one step for the sums of all leaves, in
    order of index: synchronous SGD, but for the order of addition. An asynchronous one takes a step for each sum, in
    which every gradient counts as 1/m of a step, m being the workers of the largest leaf, so that a smaller leaf's step
    is shorter. The staleness of a gradient is the number of the root's updates since the parameters that it was
    computed on.
    """

    notes: ClassVar[Notes] = NOTES

    group: int = field(default=4, metadata=SHOWN | searched(2, WORKERS))
    leaf: Level = "synchronous"
    root: Level = "synchronous"

    def __post_init__(self) -> None:
        if self.group < 1:
            raise ConfigurationError(f"group must be >= 1 workers, got {self.group}; 4 is usual")
        if self.leaf == "asynchronous" and self.root == "synchronous":
            raise CompositionError(
                "a synchronous root waits for a sum of every leaf, but leaf=asynchronous passes sums on at a rate of "
                "its own; use root=asynchronous too"
            )

    @property
    def traits(self) -> Traits:
        """Synchronous if both levels are; with asynchronous leaves workers may die."""
        completeness: Literal[1, 3] = 1 if self.root == "synchronous" else 3
        survives = self.leaf == "asynchronous"
        clips: Clips = "combined" if self.root == "synchronous" else "own"
        results: tuple[ResultPolicy, ...] = ("server", "mean", "rank0", "best")
        return Traits(completeness, survives, results, server_optimizer=True, clips=clips)

    @property
    def cell(self) -> Cell:
        """As the root schedules."""
        sync = self.root == "synchronous"
        return Cell("central", "sync" if sync else "async", "reduce" if sync else "ad hoc", "hierarchical PS")

    def servers_for(self, workers: int) -> int:
        """A root, and a leaf for each group."""
        return 1 + len(self._groups(workers))

    def held(self, workers: int, size: int) -> list[slice]:
        """Everyone holds the whole model; the root's is the result."""
        return [slice(0, size)] * self.servers_for(workers)

    def worker_state(self, me: Worker) -> ReadState:
        """Everyone starts from version 0."""
        return ReadState()

    def master_state(self, me: Server) -> LeafState | RootState:
        """Nothing collected."""
        return RootState([0] * me.cluster.workers, {}) if me.address == MASTER else LeafState()

    async def worker(self, me: Worker) -> None:
        """Compute, push to one's leaf, take the parameters that come back."""
        state: ReadState = me.state
        while me.training:
            gradient = await me.gradient()
            reply = await me.ask(self._leaf_of(me), "push", gradient, Pushed(state.version, me.lr))
            me.params[:] = reply.payload
            state.version = reply.note.version

    async def finish(self, me: Worker) -> None:
        """Leave one's leaf; it tells the root when all have."""
        me.send(self._leaf_of(me), BYE)

    async def master(self, me: Server) -> None:
        """Be the root, or a leaf."""
        groups, sync = self._groups(me.cluster.workers), self.root == "synchronous"
        if me.address == MASTER:
            largest = max(group.stop - group.start for group in groups)
            await serve_root(me, sync, me.cluster.workers if sync else largest)
        else:
            await serve_leaf(me, groups[server(1) - me.address], self.leaf == "synchronous")

    def _groups(self, workers: int) -> list[slice]:
        """The ranks of each leaf's workers."""
        return slices(workers, -(-workers // self.group))

    def _leaf_of(self, me: Worker) -> Address:
        return next(server(1 + i) for i, part in enumerate(self._groups(me.workers)) if me.rank < part.stop)
