"""A node's part in a run, from meeting to leaving, and the parts that this process has in runs.

Whatever takes part in a run does so in the same order: `meet` the other nodes, make the node, `load` its state, `begin`
together with all others, which connects the node to the messages, `start` its program, and `leave`. What differs is who
gives the gradients: a job's engine, a part of a split model, or a script. A process of a job has one session, a script
has one for each call of `distribute`, and a script with a communicator alone has one without a program.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from flockstep.arrays.schema import FlatArray, Schema
from flockstep.errors import CompositionError, ConfigurationError, FlockstepError
from flockstep.expression import to_data, to_text
from flockstep.frameworks.shard_layout import ShardLayout
from flockstep.messages import Notes
from flockstep.nodes import Cluster, Node, Worker
from flockstep.optimizers.base import Optimizer
from flockstep.runtime.adoption import say_nothing_of
from flockstep.runtime.checkpoints import ScriptCheckpoints, load
from flockstep.runtime.cut import Cut
from flockstep.runtime.follower import FollowingMember
from flockstep.runtime.member import (
    BeginAgain,
    Member,
    NodeSpec,
    die_with,
    failure_of,
    on_same_host,
    send_to_control,
)
from flockstep.runtime.part_group import NodePart, PartGroup
from flockstep.runtime.program_restart import notes_of
from flockstep.runtime.real import NodeConnection
from flockstep.runtime.replication import NOTES as REPLICAS
from flockstep.runtime.tape import require_replayable
from flockstep.strategies.base import Strategy

C = TypeVar("C", bound=NodeConnection)


class ScriptLoop(Protocol):
    """The training loop of a script, as other functions of flockstep in the script see it."""

    epoch: Callable[[], AbstractContextManager[None]] | None
    """Makes the context of an epoch over private data, whose steps end on all workers together."""
    checkpoints: ScriptCheckpoints | None
    """The script's part in the run's checkpoints; None if its framework has none."""

    def barrier(self) -> None:
        """Wait until every rank has called this."""


class Session:
    """One node's part in one run. As a context manager it reports an error to the supervisor, and leaves the run."""

    def __init__(
        self, node_spec: NodeSpec, loop: ScriptLoop | None = None, member_of: Callable[..., Member] | None = None
    ):
        """`loop`: the training loop of a script; None for the nodes of a job, and for a communicator. `member_of` makes
        the links, with the arguments of `Member`, in a replay in one process.
        """
        self.node_spec = node_spec
        self._member_of = member_of or (FollowingMember if node_spec.follows else Member)
        self.loop = loop
        self.connection: NodeConnection | None = None
        """Connects the node's program; None before the program begins, and after the run's end."""
        self.failure: Exception | None = None
        """The first error of this node."""
        self.again: BeginAgain | None = None
        """How this process takes part in the run with other workers; None if the run does not continue with it."""
        self.totals: Mapping[str, Any] = {}
        """Totals of the node's metrics when it left former workers, with whom the run does not continue."""
        self.before_leaving: list[Callable[[], None]] = []
        """What closes the communicator of a script, if it has one, before the script leaves the run."""
        self._process = os.getpid()
        self._part = ""
        self._member: Member | None = None
        self._kept: Cut | None = None

    @property
    def member(self) -> Member:
        """The links of this process to the supervisor and to the other nodes, which `meet` opens."""
        assert self._member is not None
        return self._member

    @property
    def closed(self) -> bool:
        """Whether this node takes no part in the run, or not any more."""
        return self._member is None or self._member.closed

    @property
    def exit_code(self) -> int:
        """Exit code of a process whose only session has ended."""
        if self.failure is None:
            return 0
        return self.failure.exit_code if isinstance(self.failure, FlockstepError) else 1

    def meet(
        self,
        strategy: Strategy | None,
        optimizer: Optimizer | None,
        schema: Schema,
        initial: FlatArray | None = None,
        *,
        largest: int = 0,
        part: NodePart | None = None,
        notes: Notes | None = None,
        repeats: bool = False,
    ) -> tuple[Cluster, FlatArray]:
        """Join the run; return its cluster, and the parameters that every node starts from, read-only.

        The cluster of a node that holds a part consists of the nodes with the same part.

        Args:
            strategy: None, like `optimizer`, in a script that only exchanges arrays.
            optimizer: the optimizer in the form that servers use.
            schema: the schema of the whole model, also where this node holds a part of it.
            initial: the parameters of this process, if this node may be the first.
            largest: size in bytes of the largest array that this process sends, if larger than the model.
            part: the part of a split model that the node holds; the node of a job gets the bytes of
                `ModelPart.values`.
            notes: the kinds of notes that messages carry besides those of the strategy.
            repeats: whether this process can take a step again with other workers.

        Raises:
            ConfigurationError: the supervisor refused, for example because another worker's model differs.
        """
        if self.node_spec.tapes and strategy is not None:
            require_replayable(strategy)
        self._part = "" if part is None else part.name
        known = {} if strategy is None else notes_of(strategy)
        sums = strategy is not None and strategy.sums and self.node_spec.address >= 0 and part is None
        self._member = self._member_of(self.node_spec, schema, largest, {**known, **REPLICAS, **(notes or {})}, sums)
        text, data = "" if strategy is None else to_text(strategy), {} if optimizer is None else to_data(optimizer)
        cluster, params = self._member.join(text, data, initial, part=part, repeats=repeats)
        if part is not None and strategy is not None:
            cluster = strategy.cluster(cluster.workers // part.group.parts)
        return cluster, params

    def load(self, node: Node, group: PartGroup | None = None, layout: ShardLayout | None = None) -> Cut | None:
        """Return the state from which a node goes on, whose group is `group` if the model is split; None if its run
        begins at its start. `layout`: what a script's process holds.

        Raises:
            ConfigurationError: the checkpoint is damaged, or belongs to another model.
        """
        address = node.address if group is None else group.outside(node.address)
        kept = self._kept = load(self.node_spec, address, node.params, layout)
        if kept is not None and kept.mailbox is not None:
            received = kept.mailbox.received()
            self.member.expect(received if group is None else {group.outside(peer): n for peer, n in received.items()})
        return kept

    def begin(self, connect: Callable[[Member], C]) -> C:
        """Wait until all nodes are ready, when the run's clock starts; return the node's connection, which `connect`
        makes.
        """
        self.member.begin()
        self.connection = connection = connect(self.member)
        return connection

    def start(
        self,
        begin: Callable[[], None],
        restore_buffers: Callable[[FlatArray], None] = lambda values: None,
        stops: bool = False,
    ) -> None:
        """Begin the node's program with `begin`: at its start, or where the run goes on.

        `stops`: the program takes part in checkpoints.
        """
        assert self.connection is not None
        if stops:
            self.connection.checkpoints.watch()
        kept, self._kept = self._kept, None
        if kept is None:
            begin()
        else:
            self.connection.checkpoints.restore(kept, restore_buffers, begin)

    def leave(self, buffers: dict[int, FlatArray] | None = None) -> FlatArray | None:
        """Write the totals of the node, whose program has ended, and wait for the end of the run; see
        `Member.wait_for_end`.
        """
        assert self.connection is not None
        self.connection.close()
        return self.member.wait_for_end(self.connection.attend, buffers)

    def fail(self, error: Exception) -> None:
        """Tell the supervisor why this node cannot continue, and leave the run; a second call has no effect."""
        if self.failure is not None or (self._member is not None and self._member.closed):
            return
        self.failure = error
        failure = failure_of(error, self.node_spec, None if self.worker is None else self.worker.run_step)
        failure.reason = f"{self._part}: {failure.reason}" if self._part else failure.reason
        if self._member is None:
            send_to_control(self.node_spec, failure)
            return
        if self.connection is not None:
            self.connection.salvage()
        self._member.fail(failure)
        self.close()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Context manager that reports an error of the run to the supervisor before the script sees it."""
        try:
            yield
        except FlockstepError as error:
            self.fail(error)
            raise

    def close(self) -> None:
        """Close all connections; after a failure, what is queued is delivered first."""
        failed = self.failure is not None
        if self.connection is not None:
            self.connection.leave(failed)
        if self._member is not None:
            self._member.close(0.3 if failed else 0.0)

    def end(self) -> None:
        """End the session of a script whose run has ended well, so that the script may release the model.

        The link to the supervisor that the first session has opened stays for later calls of `distribute`.
        """
        self.connection = self.loop = None
        self.before_leaving.clear()
        if self.node_spec.call == 1:
            self.member.leave()
        else:
            self.member.close(0.0)
            atexit.unregister(self._at_exit)
            _sessions.remove(self)

    def _at_exit(self) -> None:
        """Close the link at the script's end, which a process that the script has forked keeps open."""
        if os.getpid() == self._process and self._member is not None:
            self._member.line.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if isinstance(error, BeginAgain):
            self._wait_for_again(error)
        if isinstance(error, Exception) and not isinstance(error, BeginAgain):  # the job's code may raise anything
            self.fail(error)
        else:
            self.close()
        return isinstance(error, Exception)

    def _wait_for_again(self, again: BeginAgain) -> None:
        """Wait for the message how this process takes part in the run again."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.reports.flush()
            self.totals = connection.runner.metrics.kept()
            connection.leave(failed=True)  # an exchange with a lost worker may be in progress
        try:
            again = self.member.wait_for_again() if again.waits else again
        except FlockstepError as error:
            self.failure = error  # the supervisor has said it
        else:
            self.again = None if again.node_spec is None else again

    def renew(self, again: BeginAgain) -> bool:
        """Leave the run's former workers, and take a script's place among those with which the run continues, of which
        `meet` is the next step; return whether there is such a place.

        Raises:
            Interrupted: the run has ended instead.
        """
        self._wait_for_again(again)
        self.member.close(0.0)
        if self.failure is not None:
            raise self.failure
        if self.again is None or self.again.node_spec is None:
            return False
        self.node_spec, self.again, self._member = on_same_host(self.again.node_spec, self.node_spec), None, None
        die_with(self.node_spec.supervisor, self.node_spec.directory)
        return True

    @property
    def worker(self) -> Worker | None:
        """The worker that the script of this session trains; None for a communicator, and after the run's end."""
        node = None if self.connection is None else self.connection.node
        return node if isinstance(node, Worker) else None


_sessions: list[Session] = []
"""Sessions of this process's script in the order of its calls of `distribute` or `join`: that of the first call, and
those that have not ended well.
"""


def session_of_script(node_spec: NodeSpec, loop: ScriptLoop | None = None) -> Session:
    """Return the session of a call of `distribute` or `join`, before it has sockets for it.

    Raises:
        ConfigurationError: the first call has failed.
        CompositionError: the strategy of another call has background tasks.
        Interrupted: the run has failed.
    """
    if node_spec.call == 1:
        die_with(node_spec.supervisor, node_spec.directory)
    else:
        first = first_session()
        if first is None or first.failure is not None:
            raise ConfigurationError(
                "the first call of flockstep.distribute or flockstep.join failed, so later calls cannot join the "
                "run; end the script"
            )
        require_side_by_side(1)
        try:
            node_spec = first.member.begin_call(node_spec)
        except FlockstepError as error:
            say_nothing_of(error)  # the supervisor prints why
            raise
    _watch_crashes()
    session = Session(node_spec, loop)
    _sessions.append(session)
    atexit.register(
        session._at_exit
    )  # before what uses the link at exit is registered, because it is called after that
    return session


@functools.cache
def _watch_crashes() -> None:
    """Let an uncaught error of the script fail its runs.

    The supervisor prints the runs' own errors as one sentence, Python prints all others.
    """
    before = sys.excepthook

    def on_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        for session in reversed(_sessions):
            if isinstance(error, Exception):
                session.fail(error)
            if error is session.failure and isinstance(error, FlockstepError):
                return
        before(kind, error, trace)

    sys.excepthook = on_crash


def require_side_by_side(more: int = 0) -> None:
    """Refuse several simultaneous runs if the strategy of one of them has background tasks; `more` is the number of
    further runs that are about to begin.

    While the process waits in another run, these tasks would stop, or they would write to parameters between the
    script's forward and backward pass.

    Raises:
        CompositionError: a strategy has background tasks.
    """
    if len(sessions_here()) + more > 1 and works_between_steps():
        raise CompositionError(
            "optimizers of flockstep.distribute can be used side by side only if their strategies have no background "
            "tasks; call finish() on one optimizer before the next distribute(), or use a strategy such as "
            "all_reduce, ps, local_sgd or gossip"
        )


def works_between_steps() -> bool:
    """Whether a strategy of this process's script has background tasks, which other workers may wait for between two
    steps.
    """
    workers = [session.worker for session in sessions_here()]
    return any(worker is not None and worker.works_between_steps for worker in workers)


def first_session() -> Session | None:
    """The session of the first call, whose link to the supervisor lasts as long as this process; None before that
    call.
    """
    return _sessions[0] if _sessions else None


def sessions_here() -> list[Session]:
    """The sessions of this process's script that have not ended."""
    return [session for session in _sessions if not session.closed]


def newest_session() -> Session | None:
    """Return the newest session that has not ended, otherwise the newest that has ended; None if the script has taken
    part in no run.
    """
    return (sessions_here() or _sessions or [None])[-1]  # type: ignore[list-item]


def steps_here() -> int | None:
    """Number of steps that this process has taken in the runs that have not ended; None if there is no such run."""
    workers = [session.worker for session in _sessions]
    steps = [worker.run_step for worker in workers if worker is not None]
    return sum(steps) if steps else None


def barrier() -> None:
    """Wait until every rank has called this function.

    Raises:
        ConfigurationError: this process is not between `distribute` and `finish()`.
    """
    for session in reversed(sessions_here()):
        if session.loop is not None:
            session.loop.barrier()
            return
    raise ConfigurationError(
        "flockstep.barrier() needs a run; call it after distribute() and before finish(), or use the barrier() of a "
        "communicator of flockstep.join()"
    )
