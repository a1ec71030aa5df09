"""The ways in which the workers of a parameter server obtain parameters. Each access mode defines the worker's part and
the server's part.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray, slices
from flockstep.messages import Address, Message, Note, server
from flockstep.nodes import Server, Worker
from flockstep.strategies.server_state import PushState, Read, ServerState

FRESH = "fresh"
"""Message tag of parameters that a server sends without a request from the worker."""


class Pushed(Note, frozen=True):
    """Note sent with a gradient: the version of the server's parameters with which the gradient was computed, and the
    worker's learning rate.
    """

    version: int
    lr: float


class ParameterVersion(Note, frozen=True):
    """Note sent with a server's answer to a push or a fetch: the version of the parameters in the answer."""

    version: int


class Fresh(Note, frozen=True):
    """Note sent with parameters from which a worker renews its copy.

    `version` is the version of the parameters. The parameters include every gradient whose timestamp is below `clock`,
    and the first `held` gradients of the receiving worker.
    """

    version: int
    clock: int = 0
    held: int = 0


class PushedStep(NamedTuple):
    """A worker's step: its gradient, and what the worker sends to each shard."""

    parts: Mapping[Address, slice]
    """Address of each shard → the slice of the parameters that the shard holds."""
    pushes: Sequence[tuple[Address, FlatArray, Pushed]]
    """For each shard, the address, array and note to send."""
    gradient: FlatArray
    """The worker's gradient, of shape (K,)."""
    full_step: int
    """Number of gradients that make one full step."""


class Access:
    """The interface of an access mode: how workers obtain parameters from servers. An access mode defines the worker's
    part and the server's part.
    """

    def gradient(self, me: Worker, state: PushState) -> Awaitable[FlatArray | None]:
        """Return the worker's next gradient, or None if newer parameters arrived and the worker canceled the
        gradient.
        """
        return me.gradient()

    async def exchange(self, me: Worker, state: PushState, step: PushedStep) -> None:
        """Push a gradient to all shards; return once `me.params` holds the parameters for the next gradient."""
        raise NotImplementedError

    async def finish(self, me: Worker, state: PushState) -> None:
        """Receive the messages that servers send after the worker's last step. By default, servers send no such
        messages.
        """

    def pushed(self, me: Server, state: ServerState, read: Read) -> None:
        """Handle, on the server, the read request that is part of a worker's push."""
        raise NotImplementedError

    def answer(self, me: Server, state: ServerState, admitted: Sequence[Read], moved: bool) -> list[int]:
        """Send parameters to the workers whose reads are admitted. In some access modes, servers also send parameters
        to other workers.

        Args:
            me: the server.
            state: the server's state.
            admitted: the reads that the consistency rule admits now.
            moved: whether the clock of the slowest worker has advanced.

        Returns:
            Ranks of the workers that compute with the newest version from now on.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class PushPull(Access):
    """Access mode in which every push also requests the parameters, and the worker waits until the server admits the
    read.
    """

    async def exchange(self, me: Worker, state: PushState, step: PushedStep) -> None:
        for i, reply in enumerate(await me.ask_all("push", step.pushes)):
            me.params[step.parts[reply.source]] = reply.payload
            state.versions[i] = reply.note.version

    def pushed(self, me: Server, state: ServerState, read: Read) -> None:
        state.reads.append(read)

    def answer(self, me: Server, state: ServerState, admitted: Sequence[Read], moved: bool) -> list[int]:
        if not admitted:
            return []
        me.reply_all([read.message for read in admitted], me.params, ParameterVersion(me.version))
        return [read.rank for read in admitted]


@dataclass(frozen=True)
class CancelStale(Access):
    """Access mode in which servers send new parameters at once, and a worker that computes with an older version
    cancels its gradient.

    So a straggler loses only the gradient of the current step, and a lost push or a lost answer costs at most one
    gradient.
    """

    async def gradient(self, me: Worker, state: PushState) -> FlatArray | None:
        got = await me.gradient_unless(FRESH)
        if not isinstance(got, Message):
            return got
        self._take(me, state, got)
        return None

    async def exchange(self, me: Worker, state: PushState, step: PushedStep) -> None:
        """Push the gradient, then continue with the next parameters that arrive: the server's answer, or a newer
        version that the gradients of other workers completed.
        """
        for to, data, note in step.pushes:
            me.send(to, "push", data, note)
        self._take(me, state, await me.receive(FRESH))

    def _take(self, me: Worker, state: PushState, message: Message) -> None:
        """Replace the worker's parameters with the newest that have arrived."""
        for later in me.arrived(FRESH):
            message = later
        me.params[:] = message.payload
        state.versions[0] = message.note.version

    def pushed(self, me: Server, state: ServerState, read: Read) -> None:
        """Queue the worker's read request, unless the server has already sent the current version to the worker."""
        if state.newest_sent.get(read.rank) == me.version > read.version:
            state.reading[read.rank] = me.version
        else:
            state.reads.append(read)

    def answer(self, me: Server, state: ServerState, admitted: Sequence[Read], moved: bool) -> list[int]:
        """Send the newest parameters to the workers whose reads are admitted, and to the workers that compute with an
        older version.
        """
        ranks = [read.rank for read in admitted]
        ranks += [rank for rank, version in state.reading.items() if version < me.version]
        if ranks:
            me.send_all(ranks, FRESH, me.params, Fresh(me.version))
        state.newest_sent.update(dict.fromkeys(ranks, me.version))
        return ranks


@dataclass(frozen=True)
class CachedCopies(Access):
    """Access mode in which a worker computes with a copy of the parameters, adds its own steps to the copy, and
    requests a new copy when the copy is too old.
    """

    slack: int
    """Number of clocks by which a worker's copy may lag behind the worker."""

    async def exchange(self, me: Worker, state: PushState, step: PushedStep) -> None:
        """Push the gradient, take the step on the worker's copy, and request new parameters from every shard whose copy
        is older than the bound allows.
        """
        for to, data, note in step.pushes:
            me.send(to, "push", data, note)
        before = copied(me.params)
        me.optimizer_step(step.gradient)
        state.own.append((me.step - 1, (me.params - before) / step.full_step))
        me.params[:] = before + state.own[-1][1]
        await self._request_old(me, state, me.step - self.slack)

    async def _request_old(self, me: Worker, state: PushState, clock: int) -> None:
        """Request the parameters of every shard whose copy does not include all gradients up to `clock`."""
        old = [server(i) for i in range(len(state.clocks)) if state.clocks[i] < clock]
        for message in await me.ask_all("read", [(to, None, None) for to in old]):
            self._take(me, state, message)

    def _take(self, me: Worker, state: PushState, message: Message) -> None:
        """Copy a shard's parameters into the replica and add the worker's own steps that these do not include yet."""
        i, note, count = -1 - message.source, message.note, len(state.clocks)
        part = slices(len(me.params), count)[i]
        state.clocks[i], state.versions[i] = note.clock, note.version
        me.params[part] = message.payload
        for timestamp, step in state.own:
            if timestamp >= note.held:
                me.params[part] += step[part]
        oldest = me.step - 1 - max(me.step - clock for clock in state.clocks)
        state.own = [(timestamp, step) for timestamp, step in state.own if timestamp >= min(oldest, note.held)]

    def pushed(self, me: Server, state: ServerState, read: Read) -> None:
        """Do nothing, because a push requests no parameters."""

    def answer(self, me: Server, state: ServerState, admitted: Sequence[Read], moved: bool) -> list[int]:
        """Answer each read request with the parameters, and with the number of the worker's own gradients that the
        parameters include.
        """
        for read in admitted:
            me.reply(read.message, me.params, self._contents(me, state, read.rank))
        return []

    def _contents(self, me: Server, state: ServerState, rank: int) -> Fresh:
        waiting = sum(push.rank == rank for push in state.pushes)
        return Fresh(me.version, state.slowest, state.clocks[rank] - waiting)


@dataclass(frozen=True)
class EagerCopies(CachedCopies):
    """Access mode in which servers send every worker a copy of the parameters whenever the slowest clock advances.
    Workers request nothing; otherwise, the access mode equals `CachedCopies`.
    """

    async def _request_old(self, me: Worker, state: PushState, clock: int) -> None:
        """Apply the copies that have arrived, then wait until every shard includes all gradients up to `clock`."""
        for message in me.arrived(FRESH):
            self._take(me, state, message)
        for i in range(len(state.clocks)):
            while state.clocks[i] < clock:
                self._take(me, state, await me.receive(FRESH, server(i)))

    async def finish(self, me: Worker, state: PushState) -> None:
        """Wait until the worker's copies of the parameters include all gradients up to the worker's last step."""
        await self._request_old(me, state, me.step)

    def answer(self, me: Server, state: ServerState, admitted: Sequence[Read], moved: bool) -> list[int]:
        """Send the parameters to every live worker when the slowest clock has advanced."""
        params = me.freeze(me.params) if moved else me.params
        for rank in state.clocks if moved else ():
            me.send(rank, FRESH, params, self._contents(me, state, rank))
        return []
