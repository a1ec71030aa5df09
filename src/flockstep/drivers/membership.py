"""The membership of this process in a run, and the communicator that the process may open in addition."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from flockstep.drivers.member import Member
from flockstep.drivers.node_metrics import NodeMetrics


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
"""At most one entry: a process takes part in one run, because its environment holds one node specification."""


def set_membership(membership: Membership) -> None:
    """Set the membership of this process."""
    _memberships[:] = [membership]


def membership_here() -> Membership | None:
    """Return the membership of this process; None if the process takes part in no run."""
    return _memberships[0] if _memberships else None
