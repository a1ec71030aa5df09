"""The memberships of this process in runs, one for each call to `distribute`, and its communicator if it has one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from flockstep.errors import CompositionError, ConfigurationError
from flockstep.runtime.member import Member
from flockstep.runtime.node_metrics import NodeMetrics

if TYPE_CHECKING:
    from flockstep.runtime.script_checkpoints import ScriptCheckpoints


class Membership:
    """The membership of this process in a run; the process may have a communicator."""

    def __init__(self, member: Member, scalar: Callable[[str, float], None]):
        """`scalar`: function that records a scalar."""
        self.member, self.scalar = member, scalar
        self.close_communicator: Callable[[], None] | None = None
        self.epoch: Callable[[], AbstractContextManager[None]] | None = None
        """Makes the context of an epoch over private data, whose steps end on all workers together."""
        self.steps: Callable[[], int] | None = None
        """Number of steps that this process has taken in the run; None for a communicator, and after the run's end."""
        self.works_between_steps: Callable[[], bool] | None = None
        """Whether the run's strategy has background tasks, which other workers may wait for between two steps."""
        self.barrier: Callable[[], None] | None = None
        """Waits until every rank has called it."""
        self.script: ScriptCheckpoints | None = None
        """The script's part in the run's checkpoints; None if the framework of the script has none."""

    def leave(self) -> None:
        """Close the communicator of a process that leaves the run."""
        if self.close_communicator is not None:
            self.close_communicator()

    def finish(self, metrics: NodeMetrics) -> None:
        """Write the traffic of a communicator that has ended to the record."""
        self.scalar("communicator_sent_bytes", metrics.traffic.sent_bytes)
        self.scalar("communicator_messages", metrics.traffic.messages_sent)

    def fail(self, error: Exception) -> None:
        """Handle a communicator that could not be created; by default nothing happens, because the strategy may
        continue without it.
        """


_memberships: list[Membership] = []
"""Memberships of this process in the order of its calls of `distribute` or `join`: that of the first call, and those
that have not ended well.
"""


def add_membership(membership: Membership) -> None:
    """Register a membership of this process."""
    _memberships.append(membership)


def end_membership(membership: Membership) -> None:
    """Remove a membership whose run has ended, so that the script may release the model. The membership of the first
    call remains.
    """
    membership.barrier = membership.works_between_steps = membership.epoch = membership.script = None
    membership.steps = None
    membership.scalar = lambda name, value: None
    if membership is not _memberships[0]:
        _memberships.remove(membership)


def require_side_by_side(more: int = 0) -> None:
    """Refuse several simultaneous runs if the strategy of one of them has background tasks; `more` is the number of
    further runs that are about to begin.

    While the process waits in another run, these tasks would stop, or they would write to parameters between the
    script's forward and backward pass.

    Raises:
        CompositionError: a strategy has background tasks.
    """
    live = memberships_here()
    if len(live) + more > 1 and any(one.works_between_steps is not None and one.works_between_steps() for one in live):
        raise CompositionError(
            "optimizers of flockstep.distribute can be used side by side only if their strategies have no background "
            "tasks; call finish() on one optimizer before the next distribute(), or use a strategy such as "
            "all_reduce, ps, local_sgd or gossip"
        )


def first_membership() -> Membership | None:
    """The membership of the first call, whose link to the supervisor lasts as long as this process; None before that
    call.
    """
    return _memberships[0] if _memberships else None


def memberships_here() -> list[Membership]:
    """The memberships of this process that have not ended."""
    return [one for one in _memberships if not one.member.closed]


def steps_here() -> int | None:
    """Number of steps that this process has taken in the runs that have not ended; None if there is no such run."""
    steps = [one.steps() for one in _memberships if one.steps is not None]
    return sum(steps) if steps else None


def barrier() -> None:
    """Wait until every rank has called this function.

    Raises:
        ConfigurationError: this process is not between `distribute` and `finish()`.
    """
    for one in reversed(memberships_here()):
        if one.barrier is not None:
            one.barrier()
            return
    raise ConfigurationError(
        "flockstep.barrier() needs a run; call it after distribute() and before finish(), or use the barrier() of a "
        "communicator of flockstep.join()"
    )


def membership_here() -> Membership | None:
    """Return the newest membership that has not ended, otherwise the newest that has ended; None if the process has
    taken part in no run.
    """
    return (memberships_here() or _memberships or [None])[-1]  # type: ignore[list-item]
