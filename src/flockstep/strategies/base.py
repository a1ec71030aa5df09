"""The contract of a strategy."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from flockstep.arrays.schema import slices
from flockstep.errors import CompositionError
from flockstep.expression import Component
from flockstep.nodes import Server, Worker

ResultPolicy = Literal["server", "mean", "rank0", "best", "ensemble"]
Samples = Literal["own", "others", "sent"]
Optimisation = Literal["central", "decentral"]
Scheduling = Literal["sync", "bounded async", "soft-bounded async", "async"]
Clips = Literal["own", "combined", "none"]
Exchange = Literal[
    "none", "scatter-reduce", "reduce", "2:1 reduce", "binomial tree", "all-reduce", "ad hoc",
    "ad hoc with eager scatter",
]  # fmt: skip
Places = Literal[
    "none", "single PS", "distributed PS", "distributed PS (k = n)", "hierarchical PS", "replicated PS",
    "shared memory", "closed ring", "graph", "tree", "p2p mesh", "dedicated master",
]  # fmt: skip


@dataclass(frozen=True)
class Traits:
    """What a composed strategy promises."""

    completeness: Literal[1, 2, 3, 4]
    """Class on FAST's spectrum of communication completeness: 1 synchronous, 2 complete with bounded delay,
    3 complete with unbounded delay, 4 partial."""
    survives: bool | int
    """Deaths of workers after which the others still go on: a number, False for none, True for any number."""
    results: tuple[ResultPolicy, ...]
    """The policies for choosing the resulting model that make sense; the first is the default."""
    server_optimizer: bool = False
    """Gradients are applied by the servers (or by slices), whose optimiser is rebuilt from the worker's."""
    fixed_steps: bool = True
    """Every worker takes exactly the steps that it was granted; otherwise all together take at most as many."""
    needs_job: bool = False
    """Workers ask for more than their next gradient, which only a declared job can give, not a script's own loop."""
    gathers: int = 0
    """Gradients of different workers, whichever come first, that a step waits for; 0: of all of them or of none, -b: of
    all but b."""
    least: int = 1
    """Workers that must be left for the others to go on."""
    samples: Samples = "own"
    """Whose training samples a worker sees: its own alone; those of `others`, on which it computes gradients; or its
    own, of which messages carry some, as they are (`sent`)."""
    clips: Clips = "own"
    """What `flockstep.clip_grad_norm_` clips: each worker's own gradient, or the combined gradient of a step, on the
    server with `server_optimizer`; none where no node holds the whole combined gradient."""

    def deaths(self, workers: int) -> int:
        """Number of deaths among so many workers after which the others still go on."""
        most = workers - self.least
        return max(0, most if self.survives is True else min(int(self.survives), most))

    def held_up(self, workers: int) -> bool:
        """Whether a step may wait for some other workers, so that those who make no steps hold it up."""
        return 1 < (self.gathers if self.gathers > 0 else workers + self.gathers) < workers


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
