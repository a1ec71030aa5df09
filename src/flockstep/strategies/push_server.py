"""The side of the servers: what a consistency rule releases is applied as an update rule says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flockstep.arrays.schema import FlatArray
from flockstep.messages import BYE, Message
from flockstep.nodes import Server
from flockstep.strategies.consistency import Consistency, Push, Read, View
from flockstep.strategies.finite import require_finite_update
from flockstep.strategies.late_workers import FRESH
from flockstep.strategies.rules.base import Rule
from flockstep.strategies.server_state import ServerState
from flockstep.strategies.worker_copies import contents, send_fresh


@dataclass(frozen=True)
class PushServer:
    """A server that workers push gradients to; a push asks for the parameters too."""

    consistency: Consistency
    rule: Rule
    decode: Callable[[Server, Message], FlatArray]
    """The gradient (K,) that a push stands for."""

    def start(self, me: Server) -> ServerState:
        """Everyone computes on version 0."""
        ranks = range(me.cluster.workers)
        state = ServerState(dict.fromkeys(ranks, 0), rule=self.rule.start(me), reading=dict.fromkeys(ranks, 0))
        if self.consistency.bounds_values:
            state.snapshots[0] = me.params.copy()
        return state

    async def serve(self, me: Server) -> None:
        """Collect, apply what is released, answer who is admitted; in the end apply what is left."""
        state: ServerState = me.state
        state.reopen(me.version)
        async for message in me.messages():
            if message.tag == "push":
                self._push(me, state, message)
            elif message.tag == "read":
                state.reads.append(Read(message.source, message.step, int(message.note["version"]), message))
                self._settle(me, state, moved=False, newest=True)
            elif message.tag == BYE:
                self._settle(me, state, state.depart(message.source, lost=bool(message.note.get("lost"))))
        for group in self.consistency.flushed(state.pushes, self._view(me, state)):
            self._apply(me, state, group)

    def _push(self, me: Server, state: ServerState, message: Message) -> None:
        gradient = self.decode(me, message)
        require_finite_update(me, message, gradient)
        note, rank, clock = message.note, message.source, message.step
        version = int(note["version"])
        state.pushes.append(Push(rank, clock - 1, version, float(note["lr"]), gradient))
        moved = state.advance(rank, clock)
        if state.told.get(rank) == me.version > version:
            state.reading[rank] = me.version  # what it waits for is on its way already
        elif not self.consistency.keeps_copies:
            state.reads.append(Read(rank, clock, version, message))
        self._settle(me, state, moved, newest=True)

    def _settle(self, me: Server, state: ServerState, moved: bool, newest: bool = False) -> None:
        """Apply what is released now, answer who is admitted now."""
        rule = self.consistency
        # A rule that looks at clocks alone decides as before on those that wait while the slowest stands still.
        only_newest = newest and rule.by_clocks and not moved
        for group in rule.released(state.pushes[-1:] if only_newest else state.pushes, self._view(me, state)):
            self._apply(me, state, group)
        state.leave(rule.dropped(state.pushes, self._view(me, state)))
        admitted = rule.admitted(state.reads[-1:] if only_newest else state.reads, self._view(me, state))
        state.leave(reads=admitted)
        if rule.eager and moved:
            send_fresh(me, state)
        if rule.gives_up:
            self._send_new(me, state, [read.rank for read in admitted])
        elif rule.keeps_copies:
            for read in admitted:
                me.reply(read.message, me.params, contents(me, state, read.rank))
        elif admitted:
            for read in admitted:
                self.rule.read(me, state.rule, read.rank)
                state.reading[read.rank] = me.version
            me.reply_all([read.message for read in admitted], me.params, {"version": me.version})

    def _send_new(self, me: Server, state: ServerState, waiting: list[int]) -> None:
        """Send the parameters to those that wait, and to those that compute on an older version."""
        ranks = waiting + [rank for rank, version in state.reading.items() if version < me.version]
        for rank in ranks:
            self.rule.read(me, state.rule, rank)
            state.reading[rank] = state.told[rank] = me.version
        if ranks:
            me.send_all(ranks, FRESH, me.params, {"version": me.version})

    def _view(self, me: Server, state: ServerState) -> View:
        workers, live = me.cluster.workers, len(state.clocks) - len(state.done)

        def waiting(rank: int) -> bool:
            return any(push.rank == rank for push in state.pushes)

        computing, drift = len(state.reading), lambda: state.drift(me.params)
        return View(state.slowest, workers, live, len(me.lost), me.version, computing, drift, waiting)

    def _apply(self, me: Server, state: ServerState, group: list[Push]) -> None:
        share, before = len(group) / self.consistency.full_step(me.cluster.workers), me.version
        weights = self.rule.apply(me, state.rule, group, share)
        for push, weight in zip(group, weights, strict=True):
            me.record_update(push.rank, before - push.version, weight=weight)
        state.leave(group)
        if self.consistency.bounds_values:
            state.snapshots[me.version] = me.params.copy()
