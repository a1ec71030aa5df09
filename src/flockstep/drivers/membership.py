"""The memberships of this process in runs, and the communicator that the process may open in addition.

A script takes part in a run for each of its calls of `distribute`. While it waits for a message of one run, it handles
the messages of the others, so that no other process waits for it there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from flockstep.drivers.member import Member
from flockstep.drivers.node_metrics import NodeMetrics
from flockstep.errors import ConfigurationError


class Membership:
    """The membership of this process in a run; the process may have a communicator."""

    def __init__(self, member: Member, scalar: Callable[[str, float], None]):
        """`scalar`: function that records a scalar."""
        self.member, self.scalar = member, scalar
        self.close_communicator: Callable[[], None] | None = None
        self.epoch: Callable[[], AbstractContextManager[None]] | None = None
        """Makes the context of an epoch over private data, whose steps end on all workers together."""
        self.told_data = False
        """Whether the supervisor knows what data this process reads."""
        self.listen: Callable[[], None] | None = None
        """Handles the messages that have arrived, without waiting."""
        self.barrier: Callable[[], None] | None = None
        """Waits until every rank has called it."""

    def leave(self) -> None:
        """Close the communicator of a process that leaves the run."""
        if self.close_communicator is not None:
            self.close_communicator()

    def finish(self, metrics: NodeMetrics) -> None:
        """Record the traffic of a communicator that has ended."""
        self.scalar("communicator_sent_bytes", metrics.traffic.sent_bytes)
        self.scalar("communicator_messages", metrics.traffic.messages_sent)

    def fail(self, error: Exception) -> None:
        """Handle a communicator that could not be created; the strategy may continue without it."""


_memberships: list[Membership] = []
"""Memberships of this process in the order of its calls of `distribute` or `join`, ended ones included."""
_listening = threading.Lock()
"""Held while messages of other runs are handled, so that a wait among these does not begin it again."""


def add_membership(membership: Membership) -> None:
    """Add a membership of this process."""
    _memberships.append(membership)
    live = [one for one in _memberships if not one.member.closed]
    for one in live if len(live) > 1 else ():
        one.member.meanwhile = partial(listen_to_others, one)


def listen_to_others(waiting: Membership | None) -> None:
    """Handle the messages of all runs but one, which waits."""
    if not _listening.acquire(blocking=False):
        return
    try:
        for one in _memberships:
            if one is not waiting and one.listen is not None and not one.member.closed:
                one.listen()
    finally:
        _listening.release()


def first_membership() -> Membership | None:
    """The membership of the first call, whose link to the supervisor lasts as long as this process; None before."""
    return _memberships[0] if _memberships else None


def memberships_here() -> list[Membership]:
    """The memberships of this process that have not ended."""
    return [one for one in _memberships if not one.member.closed]


def barrier() -> None:
    """Wait until every rank has called this.

    Raises:
        ConfigurationError: this process follows no strategy at this time.
    """
    for one in reversed(memberships_here()):
        if one.barrier is not None:
            one.barrier()
            return
    raise ConfigurationError(
        "flockstep.barrier() needs a run; call it after distribute() and before finish(), which wait for all ranks "
        "themselves, or use the barrier() of a communicator of flockstep.join()"
    )


def membership_here() -> Membership | None:
    """The newest membership that has not ended, or else the last one; None if the process has taken part in no run."""
    return (memberships_here() or _memberships or [None])[-1]  # type: ignore[list-item]
