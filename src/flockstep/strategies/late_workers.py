"""Workers that give up a gradient, or the wait for an answer, when newer parameters come first."""

from __future__ import annotations

from collections.abc import Sequence

from flockstep.arrays.schema import FlatArray
from flockstep.messages import Address, Fields, Message
from flockstep.nodes import Worker
from flockstep.strategies.server_state import PushState

FRESH = "fresh"
"""Tag of parameters for those that wait or are late."""


async def gradient_unless_late(me: Worker, state: PushState) -> FlatArray | None:
    """The gradient, or None where newer parameters came first and were taken."""
    got = await me.gradient_unless(FRESH)
    if not isinstance(got, Message):
        return got
    _take(me, state, got)
    return None


async def push_and_take(me: Worker, state: PushState, pushes: Sequence[tuple[Address, FlatArray, Fields]]) -> None:
    """Push, and go on with the next parameters that come, be they the answer or what others have brought about.

    So whoever is late does not wait once more, and a push or an answer that is lost costs no more than being late.
    """
    for to, data, note in pushes:
        me.send(to, "push", data, note)
    _take(me, state, await me.receive(FRESH))


def _take(me: Worker, state: PushState, message: Message) -> None:
    """Take over the newest parameters that are here."""
    for later in me.arrived(FRESH):
        message = later
    me.params[:] = message.payload
    state.versions[0] = int(message.note["version"])
