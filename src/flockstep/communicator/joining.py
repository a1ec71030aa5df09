"""Creates the communicator of a process that has a strategy, that has none, or that runs alone."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from flockstep.arrays.schema import Schema
from flockstep.communicator.communicator import MAX_BYTES, Communicator
from flockstep.communicator.encoded import NOTES
from flockstep.communicator.engine import Alone
from flockstep.communicator.rank import Rank
from flockstep.errors import ConfigurationError, FlockstepError, require
from flockstep.records.events import ClockEvent
from flockstep.runtime.adoption import TIMEOUT
from flockstep.runtime.event_sender import EventSender
from flockstep.runtime.member import Member, NodeSpec, die_with, failure_of
from flockstep.runtime.membership import Membership, add_membership, membership_here, memberships_here
from flockstep.runtime.node_metrics import NodeMetrics
from flockstep.runtime.node_spec import claim_spec, enter_run, require_own_process
from flockstep.strategies.base import Strategy, Traits

BESIDE = "beside"
"""Folder of the communicators' sockets in the folder of a run's sockets."""
COMMUNICATOR = "communicator"
"""Tag of the messages about communicators between a process and the supervisor."""
NOTHING = Schema.of({"nothing": (1,)})
"""Schema of the placeholder model in a script that has no model."""


@dataclass(frozen=True)
class Unled(Strategy):
    """The strategy of a script that only exchanges arrays. The script's own code is the program, and it continues when
    a worker dies.
    """

    @property
    def traits(self) -> Traits:
        """Traits of a script without a strategy: its exchanges may be partial, it continues without lost workers, and
        it has no resulting model.
        """
        return Traits(delivery="partial", survives=True, results=())

    async def worker(self, me: object) -> None:
        """Do nothing: the script itself is the program."""


def rule_of(text: str) -> Strategy:
    """Return the strategy that an expression describes; for an empty expression, that of a script that only exchanges
    arrays.
    """
    return Strategy.parse(text) if text else Unled()


def extra_sockets(member: Member, max_bytes: int) -> Member:
    """Return a communicator's own sockets, besides those of `member`, connected to the sockets of all other ranks.

    Raises:
        ConfigurationError: another worker's communicator has a different max_bytes.
        PeerLost: another worker died, or left the run without a communicator.
    """
    directory = Path(member.node_spec.directory, BESIDE)  # in the run's private folder, where names are taken
    directory.mkdir(mode=0o700, exist_ok=True)
    beside = Member(dataclasses.replace(member.node_spec, directory=str(directory)), NOTHING, max_bytes, NOTES)
    try:
        beside.introduce("", {}, beside=True)
        beside.meet_all(COMMUNICATOR)
        member.tell(COMMUNICATOR)
        beside.wait_for("go")
    except FlockstepError:
        beside.close(0.0)
        raise
    return beside


class ScriptMembership(Membership):
    """A script's part in a run without a strategy: admission, supervision, records, and its end."""

    def __init__(self, node_spec: NodeSpec):
        """Join the run.

        Raises:
            ConfigurationError: the supervisor refused, for example because another worker follows a strategy.
        """
        die_with(node_spec.supervisor, node_spec.directory)
        super().__init__(Member(node_spec, NOTHING), lambda name, value: None)
        self._failed = self._over = False
        self._hook, sys.excepthook = sys.excepthook, self._on_crash
        try:
            self.member.join("", {}, np.zeros(1, np.float32))
            self.member.begin()
        except FlockstepError as error:
            self.fail(error)
            raise

    def finish(self, metrics: NodeMetrics) -> None:
        """Write the totals to the record, and wait until all workers have finished."""
        if self._failed:
            return
        emit = metrics.emit = EventSender(self.member).write
        emit(ClockEvent(self.member.seconds(), self.member.node_spec.address, *self.member.clock))
        metrics.close(self.member.seconds(), np.empty(0, np.float32))
        self.member.tell("done", None, {"step": 0})
        try:
            self.member.wait_for_end()
            self._over = True
        finally:
            self._failed = True
            self.member.leave()

    def fail(self, error: Exception) -> None:
        """Tell the supervisor why this script cannot continue."""
        if not self._failed:
            self._failed = True
            with contextlib.suppress(FlockstepError):
                self.member.fail(failure_of(error, self.member.node_spec, None))
            self.member.close(0.3)

    def _on_crash(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Report a crash; the supervisor prints flockstep's own errors as one sentence, others are printed here."""
        if isinstance(error, Exception):
            self.fail(error)
        if self._over or not isinstance(error, FlockstepError):  # no other process would print it
            self._hook(kind, error, trace)


def join(max_bytes: int = MAX_BYTES, timeout: float = TIMEOUT) -> Communicator:
    """Return the communicator of this process; see `flockstep.join`."""
    require(1 <= max_bytes < 1 << 62, "max_bytes", ">= 1", max_bytes, f"leave it out for the default of {MAX_BYTES}")
    node_spec, membership = enter_run(timeout), membership_here()
    if node_spec is None:
        require_own_process("join")
        return Communicator(Rank(0, 1, 0), Alone(), max_bytes)
    if membership is None:
        from flockstep.frameworks.job import import_components

        import_components(node_spec.imports)
        claim_spec()
        membership = ScriptMembership(node_spec)
        add_membership(membership)
    elif membership.member.closed:
        raise ConfigurationError(
            "this process has left the run already; call flockstep.join after flockstep.distribute and before finish()"
        )
    elif any(one.close_communicator is not None for one in memberships_here()):
        raise ConfigurationError("this process has joined the run already; call flockstep.join once in a script")
    try:
        beside = extra_sockets(membership.member, max_bytes)
    except FlockstepError as error:
        membership.fail(error)
        raise
    node = Rank(node_spec.address, node_spec.workers, node_spec.seed)
    node.hosts = membership.member.hosts
    return Communicator(node, beside, max_bytes, 2 * node_spec.heartbeat, membership)
