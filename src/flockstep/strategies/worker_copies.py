"""Workers that compute on a copy of the parameters which is renewed now and then, with their own steps added to it."""

from __future__ import annotations

from collections.abc import Sequence

from flockstep.arrays.schema import FlatArray, slices
from flockstep.messages import Address, Fields, Message, server
from flockstep.nodes import Server, Worker
from flockstep.strategies.consistency import Consistency
from flockstep.strategies.server_state import PushState, ServerState


def contents(me: Server, state: ServerState, rank: int) -> Fields:
    """What a copy for that worker holds: a version, everyone's gradients up to a clock, so many of its own."""
    waiting = sum(push.rank == rank for push in state.pushes)
    return {"version": me.version, "clock": state.slowest, "held": state.clocks[rank] - waiting}


def send_fresh(me: Server, state: ServerState) -> None:
    """Send a copy to every live worker."""
    params = me.freeze(me.params)
    for rank in state.clocks:
        me.send(rank, "fresh", params, contents(me, state, rank))


async def push_and_keep(
    me: Worker,
    state: PushState,
    pushes: Sequence[tuple[Address, FlatArray, Fields]],
    gradient: FlatArray,
    rule: Consistency,
) -> None:
    """Push, step the own copy, take what is fresh; where a part is older than the bound allows, wait for it or ask."""
    for to, data, note in pushes:
        me.send(to, "push", data, note)
    before = me.params.copy()
    me.optimizer_step(gradient)
    state.own.append((me.step - 1, (me.params - before) / rule.full_step(me.workers)))
    me.params[:] = before + state.own[-1][1]
    await renew(me, state, rule, me.step - rule.slack)


async def renew(me: Worker, state: PushState, rule: Consistency, clock: int) -> None:
    """Take what has arrived, and more until every part holds all gradients up to `clock`."""
    parts = slices(len(me.params), len(state.clocks))
    for message in me.arrived("fresh"):
        _take(me, state, message, parts)
    if rule.eager:
        for i in range(len(parts)):
            while state.clocks[i] < clock:
                _take(me, state, await me.receive("fresh", server(i)), parts)
        return
    old = [server(i) for i in range(len(parts)) if state.clocks[i] < clock]
    for message in await me.ask_all("read", [(to, None, {"version": 0}) for to in old]):
        _take(me, state, message, parts)


def _take(me: Worker, state: PushState, message: Message, parts: Sequence[slice]) -> None:
    """Put a copy in place, with this worker's own steps that it does not hold yet."""
    i = -1 - message.source
    part, note = parts[i], message.note
    state.clocks[i], state.versions[i] = int(note["clock"]), int(note["version"])
    me.params[part] = message.payload
    for step in _missing(state, int(note["held"])):
        me.params[part] += step[part]
    oldest = me.step - 1 - max(me.step - state.clocks[k] for k in range(len(parts)))
    state.own = [(timestamp, step) for timestamp, step in state.own if timestamp >= min(oldest, int(note["held"]))]


def _missing(state: PushState, held: int) -> list[FlatArray]:
    """This worker's own steps that a copy which holds `held` of them does not hold."""
    return [step for timestamp, step in state.own if timestamp >= held]
