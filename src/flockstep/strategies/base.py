"""The interface of a strategy, and its place in the taxonomy of data-parallel training."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Literal

from flockstep.arrays.schema import FlatArray, slices
from flockstep.codecs.base import Codec
from flockstep.collectives.base import Collective
from flockstep.errors import CompositionError, ConfigurationError
from flockstep.expression import Component
from flockstep.messages import Message, Notes
from flockstep.nodes import Cluster, Server, Worker
from flockstep.optimizers.base import OptimizerState
from flockstep.strategies.resizing import FormerWorker, Resizing, keep
from flockstep.strategies.traits import Clips as Clips
from flockstep.strategies.traits import ResultPolicy as ResultPolicy
from flockstep.strategies.traits import Traits as Traits

Optimization = Literal["central", "decentral"]
Scheduling = Literal["sync", "bounded async", "soft-bounded async", "async"]
Exchange = Literal[
    "none", "scatter-reduce", "reduce", "2:1 reduce", "binomial tree", "all-reduce", "ad hoc",
    "ad hoc with eager scatter",
]  # fmt: skip
Places = Literal[
    "none", "single PS", "distributed PS", "distributed PS (k = n)", "hierarchical PS", "replicated PS",
    "shared memory", "closed ring", "graph", "tree", "p2p mesh", "dedicated master", "distributed array abstraction",
]  # fmt: skip


MOST_REPLICAS = 4
"""Largest number of backups of a server; every message to the server passes through all of them."""


@dataclass(frozen=True)
class TaxonomyEntry:
    """Position of a composed strategy in the taxonomy of Langer et al. (2020, section 3 and table 1)."""

    optimization: Optimization
    """"central" if the workers exchange gradients and optimize one model; "decentral" if each worker optimizes its own
    replica and the workers exchange parameters.
    """
    scheduling: Scheduling
    exchange: Exchange
    topology: Places


def missing_strategy(what: str, where: str = "") -> ConfigurationError:
    """Return the error for a call or a command, named `what`, that was given no strategy; `where` it is written."""
    return ConfigurationError(
        f"{what} needs a strategy{where}, such as all_reduce, which keeps the parameters of all workers equal, "
        "local_sgd(period=8), which exchanges parameters every 8 steps, or ps(consistency=ssp(3)), which lets fast "
        "workers be 3 steps ahead of slow ones; flockstep list strategies shows all"
    )


class Strategy(Component):
    """A distributed training algorithm: when nodes exchange messages, with whom, what the messages contain, and how a
    node applies the received arrays.

    A strategy has one coroutine per role: `worker` for workers, `master` for servers. A node runs the coroutine of its
    role as its program. A program keeps whatever it must remember between steps in the state object `me.state`, never
    in a local variable, so that a program restarted from its state at a step boundary continues bit for bit.
    """

    noun: ClassVar[str] = "strategy"
    notes: ClassVar[Notes] = {}
    """Types of the notes that messages carry. A key of the mapping is a message tag ("push", "push/channel") or "reply
    to TAG"; the value is the `Note` class of all messages with this tag.
    """
    checks: ClassVar[frozenset[str]] = frozenset()
    """Tags of messages to servers that carry a gradient, which the program checks with `accepted`; the driver checks
    that the arrays of all other messages to servers are finite.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("worker", "master", "finish"):
            if name in vars(cls) and not inspect.iscoroutinefunction(inspect.unwrap(vars(cls)[name])):
                raise ConfigurationError(f"{cls.__name__}.{name} must be a coroutine; write async def {name}")

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """The properties that this strategy guarantees. Checks and drivers read the properties, never the strategy's
        name.
        """

    @property
    def taxonomy_entry(self) -> TaxonomyEntry | None:
        """The strategy's entry in the taxonomy of Langer et al. (2020), or None if the taxonomy has no entry for the
        composition.
        """
        return None

    @property
    def servers(self) -> int:
        """Number of servers, that is, of nodes that run `master`. By default, server i of k holds the i-th of k slices
        of the parameters.
        """
        return 0

    def servers_for(self, workers: int) -> int:
        """Number of servers for a run with the given number of `workers`."""
        return self.servers

    @property
    def replicas(self) -> int:
        """Number of backups of each server: processes that run the server's program on the same messages."""
        return 0

    def largest_message(self, nbytes: int) -> int:
        """Return the size in bytes of the largest array that a node sends, for a model of `nbytes` bytes."""
        return nbytes

    def expected_sends(self, workers: int, steps: int) -> float | None:
        """Return the expected number of times that a worker sends parameters or an update, all workers together, if
        the workers draw at random whether to send; None if nothing is drawn.
        """
        return None

    def beside(self, workers: int) -> tuple[int, ...]:
        """Return, for each server, the rank of the worker on whose host the server runs; empty if servers are assigned
        to the hosts in turn.
        """
        return ()

    def cluster(self, workers: int) -> Cluster:
        """Return the workers, servers and backups of a run with the given number of `workers`."""
        return Cluster(workers, self.servers_for(workers), self.beside(workers), self.replicas)

    @property
    def coding(self) -> Codec | None:
        """The codec whose encoding time counts as part of a worker's step, or None. Messages may be encoded by a
        different codec.
        """
        return getattr(self, "codec", None)

    @property
    def steps_alone(self) -> bool:
        """Whether the only worker of a run passes each gradient to its optimizer unread, so that the gradients may be
        stored outside the flat array.
        """
        return False

    def decodes(self, workers: int) -> int:
        """Number of times per step that a worker decodes a message of the whole model's size."""
        return 0 if self.servers_for(workers) else 1 if self.coding is None or self.coding.linear else workers

    def held(self, workers: int, size: int) -> list[slice]:
        """Return, for each server, the slice of the `size` parameters that the server holds.

        If several servers hold the same slice, the resulting model uses the first of them.
        """
        count = self.servers_for(workers)
        return slices(size, count) if count else []

    @property
    def sums(self) -> bool:
        """Whether all workers take part in collective sums, because the strategy or a component has a collective."""
        return _has_collective(self)

    def check(self, workers: int) -> None:
        """Check that the strategy can run on the given number of workers.

        Raises:
            ConfigurationError: the strategy cannot run on `workers` workers.
        """

    @property
    def resizing(self) -> Resizing:
        """The rule by which nodes get their states when a run continues with another number of workers."""
        if not self.traits.results:
            return Resizing(refused="it has no model, so nothing says with which state a new worker begins")
        if self.traits.results[0] in ("best", "ensemble"):
            return Resizing(
                refused="each worker trains a separate model, and no rule determines the model of a new worker"
            )
        return Resizing()

    def replica(self, former: FormerWorker) -> tuple[FlatArray, float]:
        """Return the replica (K,) of a worker whose program has ended, and its weight in the mean of the replicas."""
        return former.params, 1.0

    @property
    def repeats(self) -> Literal["", "step", "round"]:
        """What workers that live take again when others are lost, with what their processes hold: the step in hand, if
        replicas are equal and step once along each gradient; the exchange of a `round`, where a program calls
        `Worker.hold`; or nothing, so that the run goes back to a checkpoint.
        """
        rule, traits = self.resizing, self.traits
        alike = traits.alike and traits.in_step and not (rule.steps_at_end or rule.refused)
        return "step" if alike else ""

    def go_on(self, me: Worker, state: Any) -> None:
        """Set the state of a worker that goes on with `state`, in the middle of a run, beside another number of
        workers.
        """
        me.state = state
        me.state = self.worker_state(me)
        self.take_over(me, [FormerWorker(me.rank, me.params, me.step, state, OptimizerState())] * me.workers)

    def take_over(self, me: Worker, former: Sequence[FormerWorker]) -> None:
        """Set the state of a worker after the number of workers has changed, by the rule that `resizing` returns.

        `me` is the worker, initialized as at the start of a run, with its new replica; `former` are the workers before
        the change, by rank.
        """
        rule = self.resizing
        if me.rank < len(former):
            keep(me.state, former[me.rank].state, rule.own)
        keep(me.state, former[0].state, rule.common)

    def forget(self, state: Any, step: int, least: int) -> None:
        """Forget the exchanges in the background that a worker has begun after step `least`.

        The number of workers changes when this worker has taken `step` steps, and the slowest one `least`: an exchange
        that began later ends for nobody, because the slowest worker never begins it.
        """

    def most_stale(self, workers: int) -> int | None:
        """Return the largest staleness that an update may have in the record of a run of `workers` workers; None if
        there is no bound.
        """
        return 0 if self.traits.delivery == "synchronous" else None

    def mass(self, states: Iterable[Any], waiting: Iterable[Message]) -> tuple[int, int] | None:
        """Return the total mass (push-sum weight) in the workers' states and unread messages, and the total mass
        expected; None if the strategy conserves no mass.
        """
        return None

    def worker_state(self, me: Worker) -> Any:
        """Return the state object that a worker's program starts with."""
        return None

    def master_state(self, me: Server) -> Any:
        """Return the state object that a server's program starts with."""
        return None

    @abstractmethod
    async def worker(self, me: Worker) -> None:
        """Run a worker's program until its last gradient has been used."""

    async def finish(self, me: Worker) -> None:
        """Send the updates that a worker has held back until after its last gradient, then leave the run."""
        me.leave()

    async def master(self, me: Server) -> None:
        """Run a server's program until every worker has left."""
        raise CompositionError(f"{self} has no server")


def check_replicas(replicas: int) -> None:
    """Raise `ConfigurationError` unless servers may have the given number of backups."""
    if not 0 <= replicas <= MOST_REPLICAS:
        raise ConfigurationError(
            f"replicas must be >= 0 and <= {MOST_REPLICAS} backups of each server, got {replicas}; 1 survives the "
            "death of one process of each server"
        )


def _has_collective(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_collective, value))
    if isinstance(value, Collective):
        return True
    return is_dataclass(value) and any(_has_collective(getattr(value, one.name)) for one in fields(value))


def choose_result(strategy: Strategy, wanted: ResultPolicy | None) -> ResultPolicy:
    """Return the policy that chooses the resulting model: `wanted`, or the strategy's default if `wanted` is None.

    Raises:
        CompositionError: the strategy does not offer the policy `wanted`.
    """
    results = strategy.traits.results
    if wanted is None:
        return results[0]
    if wanted not in results:
        raise CompositionError(
            f"result must be one of {', '.join(results)} for {strategy}, got {wanted}; leave it out for {results[0]}"
        )
    return wanted
