"""Creates the communicator of a process that has a strategy, that has none, or that runs alone."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from flockstep.arrays.schema import Schema
from flockstep.communicator.communicator import MAX_BYTES, Communicator
from flockstep.communicator.encoded import NOTES
from flockstep.communicator.engine import Alone
from flockstep.communicator.rank import Rank
from flockstep.errors import ConfigurationError, FlockstepError, require
from flockstep.records.events import ClockEvent
from flockstep.runtime.adoption import TIMEOUT
from flockstep.runtime.member import Member
from flockstep.runtime.node_metrics import NodeMetrics
from flockstep.runtime.node_spec import claim_spec, enter_run, require_own_process
from flockstep.runtime.reports import EventSender
from flockstep.runtime.session import Session, newest_session, session_of_script, sessions_here
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


def _finish(session: Session, metrics: NodeMetrics) -> None:
    """Write the traffic of a communicator that has ended to the record; if the script has no strategy, its part in the
    run has ended, too, and it waits until all workers have finished.
    """
    if session.loop is not None:
        if session.connection is not None:
            session.connection.runner.scalar("communicator_sent_bytes", metrics.traffic.sent_bytes)
            session.connection.runner.scalar("communicator_messages", metrics.traffic.messages_sent)
    elif not session.closed:
        member = session.member
        emit = metrics.emit = EventSender(member).write
        emit(ClockEvent(member.seconds(), member.node_spec.address, *member.clock))
        metrics.close(member.seconds(), np.empty(0, np.float32))
        with session.telling():
            member.tell("done", None, {"step": 0})
            member.wait_for_end()
        session.end()


def join(max_bytes: int = MAX_BYTES, timeout: float = TIMEOUT) -> Communicator:
    """Return the communicator of this process, which sends arrays of up to `max_bytes` bytes between the ranks of the
    run.

    In a script that `flockstep launch -n 4` started, the process has rank 0, 1, 2 or 3 of 4; otherwise, it has rank 0
    of 1. Every rank must call `join`, after `distribute` if the rank follows a strategy; the call returns when all
    ranks have called `join`. Processes that torchrun, mpirun or srun started must all make their first call,
    `distribute` or `join`, within `timeout` seconds.

    Raises:
        ConfigurationError: this process has a communicator already, or the workers do not agree on `max_bytes`.
        PeerLost: another rank died, or left without calling `join`.
    """
    require(1 <= max_bytes < 1 << 62, "max_bytes", ">= 1", max_bytes, f"leave it out for the default of {MAX_BYTES}")
    node_spec, session = enter_run(timeout), newest_session()
    if node_spec is None:
        require_own_process("join")
        return Communicator(Rank(0, 1, 0), Alone(), max_bytes)
    if session is None:
        from flockstep.frameworks.job import import_components

        import_components(node_spec.imports)
        claim_spec()
        session = session_of_script(node_spec)
        with session.telling():
            session.meet(None, None, NOTHING, np.zeros(1, np.float32))
            session.member.begin()
    elif session.closed:
        raise ConfigurationError(
            "this process has left the run already; call flockstep.join after flockstep.distribute and before finish()"
        )
    elif any(one.before_leaving for one in sessions_here()):
        raise ConfigurationError("this process has joined the run already; call flockstep.join once in a script")
    with session.telling() if session.loop is None else nullcontext():
        if node_spec.tapes or node_spec.follows:
            raise ConfigurationError(
                "what flockstep.join exchanges is not recorded, so a run with it cannot be replayed; leave out "
                "--replayable"
            )
        beside = extra_sockets(session.member, max_bytes)
    node = Rank(node_spec.address, node_spec.workers, node_spec.seed)
    node.hosts = session.member.hosts
    communicator = Communicator(node, beside, max_bytes, 2 * node_spec.heartbeat, partial(_finish, session))
    session.before_leaving.append(communicator.close)
    return communicator
