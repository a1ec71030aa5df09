"""How the workers of a parameter server come by parameters: the worker's program and the server's, for each way."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray, slices
from flockstep.messages import Address, Message, Note, server
from flockstep.nodes import Server, Worker
from flockstep.strategies.server_state import PushState, Read, ServerState

FRESH = "fresh"
"""Tag of parameters that nobody asked for."""


class Pushed(Note, frozen=True):
    """Beside a gradient: the version that the worker computed it on, and the learning rate."""

    version: int
    lr: float


class Held(Note, frozen=True):
    """Beside parameters that answer a push: their version."""

    version: int


class Fresh(Note, frozen=True):
    """Beside parameters for a worker's copy: version, all gradients up to a clock, so many of the worker's own."""

    version: int
    clock: int = 0
    held: int = 0


Pushes = Sequence[tuple[Address, FlatArray, Pushed]]


class Access:
    """A way for workers to come by the parameters: what both sides do about it."""

    def gradient(self, me: Worker, state: PushState) -> Awaitable[FlatArray | None]:
        """The next gradient; None where the worker has given it up."""
        return me.gradient()

    async def exchange(
        self,
        me: Worker,
        state: PushState,
        parts: Sequence[slice],
        pushes: Pushes,
        gradient: FlatArray,
        full_step: int,
    ) -> None:
        """Push a gradient to all shards, and return with the parameters for the next one.

        Args:
            parts: for each shard, what it holds.
            pushes: for each shard, what it is sent.
            full_step: gradients that make a step.
        """
        raise NotImplementedError

    async def finish(self, me: Worker, state: PushState) -> None:
        """What the worker still takes after its last step."""

    def pushed(self, me: Server, state: ServerState, read: Read) -> None:
        """A worker has pushed, and would read."""
        raise NotImplementedError

    def answer(self, me: Server, state: ServerState, admitted: Sequence[Read], moved: bool) -> list[int]:
        """Send parameters to whoever is due some; `moved`: the slowest clock has. Returns who has read the newest."""
        raise NotImplementedError


@dataclass(frozen=True)
class Asks(Access):
    """Every push asks for the parameters too, and the worker waits until its read is admitted."""

    async def exchange(
        self,
        me: Worker,
        state: PushState,
        parts: Sequence[slice],
        pushes: Pushes,
        gradient: FlatArray,
        full_step: int,
    ) -> None:
        """Push and take what comes back."""
        for i, reply in enumerate(await me.ask_all("push", pushes)):
            me.params[parts[i]] = reply.payload
            state.versions[i] = reply.note.version

    def pushed(self, me: Server, state: ServerState, read: Read) -> None:
        """It waits."""
        state.reads.append(read)

    def answer(self, me: Server, state: ServerState, admitted: Sequence[Read], moved: bool) -> list[int]:
        """Those who are admitted."""
        if not admitted:
            return []
        me.reply_all([read.message for read in admitted], me.params, Held(me.version))
        return [read.rank for read in admitted]


@dataclass(frozen=True)
class GivesUp(Access):
    """Whoever computes on an old version gives up when a newer one comes, which servers send as soon as there is one.

    Whoever is late does not wait once more, and a push or an answer that is lost costs no more than being late.
    """

    async def gradient(self, me: Worker, state: PushState) -> FlatArray | None:
        """The gradient, unless newer parameters come first."""
        got = await me.gradient_unless(FRESH)
        if not isinstance(got, Message):
            return got
        self._take(me, state, got)
        return None

    async def exchange(
        self,
        me: Worker,
        state: PushState,
        parts: Sequence[slice],
        pushes: Pushes,
        gradient: FlatArray,
        full_step: int,
    ) -> None:
        """Push, and go on with the next parameters that come, be they the answer or what others have brought about."""
        for to, data, note in pushes:
            me.send(to, "push", data, note)
        self._take(me, state, await me.receive(FRESH))

    def _take(self, me: Worker, state: PushState, message: Message) -> None:
        """Take over the newest parameters that are here."""
        for later in me.arrived(FRESH):
            message = later
        me.params[:] = message.payload
        state.versions[0] = message.note.version

    def pushed(self, me: Server, state: ServerState, read: Read) -> None:
        """It waits, unless what it waits for is on its way already."""
        if state.told.get(read.rank) == me.version > read.version:
            state.reading[read.rank] = me.version
        else:
            state.reads.append(read)

    def answer(self, me: Server, state: ServerState, admitted: Sequence[Read], moved: bool) -> list[int]:
        """Those who are admitted, and those who compute on an older version."""
        ranks = [read.rank for read in admitted]
        ranks += [rank for rank, version in state.reading.items() if version < me.version]
        if ranks:
            me.send_all(ranks, FRESH, me.params, Fresh(me.version))
        state.told.update(dict.fromkeys(ranks, me.version))
        return ranks


@dataclass(frozen=True)
class Copies(Access):
    """A worker computes on a copy, to which it adds its own steps, and asks for another when its own is too old."""

    slack: int
    """Clocks by which a worker's copy may lag behind it."""

    async def exchange(
        self,
        me: Worker,
        state: PushState,
        parts: Sequence[slice],
        pushes: Pushes,
        gradient: FlatArray,
        full_step: int,
    ) -> None:
        """Push, step the copy, take what is fresh; where a part is older than the bound allows, wait for it or ask."""
        for to, data, note in pushes:
            me.send(to, "push", data, note)
        before = copied(me.params)
        me.optimizer_step(gradient)
        state.own.append((me.step - 1, (me.params - before) / full_step))
        me.params[:] = before + state.own[-1][1]
        await self._renew(me, state, me.step - self.slack)

    async def _renew(self, me: Worker, state: PushState, clock: int) -> None:
        """Ask for every part that does not hold all gradients up to `clock`."""
        old = [server(i) for i in range(len(state.clocks)) if state.clocks[i] < clock]
        for message in await me.ask_all("read", [(to, None, None) for to in old]):
            self._take(me, state, message)

    def _take(self, me: Worker, state: PushState, message: Message) -> None:
        """Put a part of a copy in place, with this worker's own steps that it does not hold yet."""
        i, note, count = -1 - message.source, message.note, len(state.clocks)
        part = slices(len(me.params), count)[i]
        state.clocks[i], state.versions[i] = note.clock, note.version
        me.params[part] = message.payload
        for step in _missing(state, note.held):
            me.params[part] += step[part]
        oldest = me.step - 1 - max(me.step - clock for clock in state.clocks)
        state.own = [(timestamp, step) for timestamp, step in state.own if timestamp >= min(oldest, note.held)]

    def pushed(self, me: Server, state: ServerState, read: Read) -> None:
        """A push asks for nothing."""

    def answer(self, me: Server, state: ServerState, admitted: Sequence[Read], moved: bool) -> list[int]:
        """Those who have asked, each with what its copy holds of its own."""
        for read in admitted:
            me.reply(read.message, me.params, self._contents(me, state, read.rank))
        return []

    def _contents(self, me: Server, state: ServerState, rank: int) -> Fresh:
        waiting = sum(push.rank == rank for push in state.pushes)
        return Fresh(me.version, state.slowest, state.clocks[rank] - waiting)


@dataclass(frozen=True)
class SentCopies(Copies):
    """As with `Copies`, but nobody asks: whenever the slowest clock advances, servers send everyone a copy."""

    async def _renew(self, me: Worker, state: PushState, clock: int) -> None:
        """Take what has arrived, and more until every part holds all gradients up to `clock`."""
        for message in me.arrived(FRESH):
            self._take(me, state, message)
        for i in range(len(state.clocks)):
            while state.clocks[i] < clock:
                self._take(me, state, await me.receive(FRESH, server(i)))

    async def finish(self, me: Worker, state: PushState) -> None:
        """What servers send last."""
        await self._renew(me, state, me.step)

    def answer(self, me: Server, state: ServerState, admitted: Sequence[Read], moved: bool) -> list[int]:
        """Every live worker, when the slowest clock has moved."""
        params = me.freeze(me.params) if moved else me.params
        for rank in state.clocks if moved else ():
            me.send(rank, FRESH, params, self._contents(me, state, rank))
        return []


def _missing(state: PushState, held: int) -> list[FlatArray]:
    """This worker's own steps that a copy which holds `held` of them does not hold."""
    return [step for timestamp, step in state.own if timestamp >= held]
