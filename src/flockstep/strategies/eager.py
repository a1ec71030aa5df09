"""Both sides of servers that send fresh parameters by themselves."""

from __future__ import annotations

from collections.abc import Sequence

from flockstep.arrays.schema import FlatArray, slices
from flockstep.messages import Address, Message, Note, server
from flockstep.nodes import Server, Worker
from flockstep.strategies.server_state import PushState, ServerState


def send_fresh(me: Server, state: ServerState) -> None:
    """Send the parameters to every live worker, and how many of its own gradients they hold."""
    waiting = {rank: sum(push.rank == rank for push in state.pushes) for rank in state.clocks}
    params = me.freeze(me.params)
    for rank, clock in state.clocks.items():
        held = clock - waiting[rank]
        me.send(rank, "fresh", params, {"version": me.version, "clock": state.slowest, "held": held})


async def push_eagerly(
    me: Worker, state: PushState, pushes: Sequence[tuple[Address, FlatArray, Note]], gradient: FlatArray, slack: int
) -> None:
    """Push, take what is fresh, and wait for more only where a copy is older than the bound allows."""
    shards = len(pushes)
    for to, data, note in pushes:
        me.send(to, "push", data, note)
    before = me.params.copy()
    me.optimizer_step(gradient)
    state.own.append((me.step - 1, (me.params - before) / me.workers))
    me.params[:] = before + state.own[-1][1]
    parts = slices(len(me.params), shards)
    for message in me.arrived("fresh"):
        _take(me, state, message, parts)
    for i in range(shards):
        while state.clocks[i] < me.step - slack:
            _take(me, state, await me.receive("fresh", server(i)), parts)


async def take_last(me: Worker, state: PushState) -> None:
    """Wait for the copies that hold every gradient of everyone who lives."""
    parts = slices(len(me.params), len(state.clocks))
    for message in me.arrived("fresh"):
        _take(me, state, message, parts)
    for i in range(len(parts)):
        while state.clocks[i] < me.step:
            _take(me, state, await me.receive("fresh", server(i)), parts)


def _take(me: Worker, state: PushState, message: Message, parts: Sequence[slice]) -> None:
    """Put a copy in place, with this worker's own steps that it does not hold yet."""
    i = -1 - message.source
    part, note = parts[i], message.note
    state.clocks[i], state.versions[i] = int(note["clock"]), int(note["version"])
    me.params[part] = message.payload
    missing = [step for timestamp, step in state.own if timestamp >= int(note["held"])]
    for step in missing:
        me.params[part] += step[part]
    oldest = me.step - 1 - max(me.step - state.clocks[k] for k in range(len(parts)))
    state.own = [(timestamp, step) for timestamp, step in state.own if timestamp >= min(oldest, int(note["held"]))]
