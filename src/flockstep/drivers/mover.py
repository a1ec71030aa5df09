"""`flockstep.join`: any array from any rank to any other, encoded as asked, from any thread of a user's program."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any, Self

import numpy as np

from flockstep.codecs.base import Codec
from flockstep.drivers.member import Member, in_short
from flockstep.drivers.mover_calls import Collectives, named
from flockstep.drivers.mover_node import CLOSING, REQUEST, SEND, Party
from flockstep.drivers.mover_packets import checked, unpacked
from flockstep.drivers.mover_place import Place, ScriptPlace, place_here, sockets_beside, take_place
from flockstep.drivers.mover_pump import Pump
from flockstep.drivers.mover_shared import SharedArray, SharedWindow, array_bytes, attached, segment_bytes
from flockstep.drivers.mover_window import ADD, FAILED, GET, PUT, Window
from flockstep.drivers.ticket import claim_ticket, place_of_script, require_own_process, ticket_from_environment
from flockstep.errors import CompositionError, ConfigurationError, FlockstepError, PeerLost
from flockstep.messages import Array, Message, node_name
from flockstep.transports.shared_memory import SharedMemory

MAX_BYTES = 1 << 30
"""The largest array, in bytes, that a mover takes unless it is told otherwise."""
LINGER, LOST_LINGER = 2.0, 0.3
"""Seconds in which what was sent last is still delivered after a mover has closed; the same if somebody is dead."""
LONGEST = 4000
"""Characters of an error that travel."""
Handler = Callable[[int, Array | None], Any]


def join(max_bytes: int = MAX_BYTES) -> Mover:
    """The mover of this process: rank r of n in a script that `flockstep launch -n n` started, else 0 of 1.

    In a script that follows a strategy, call it after `flockstep.distribute`. All ranks have to call it, with the same
    `max_bytes`, the size of the largest array that travels; it returns once they have.

    Raises:
        ConfigurationError: this process has a mover already, or the workers do not agree.
        PeerLost: another rank died, or left without calling it.
    """
    if not 1 <= max_bytes < 1 << 62:
        raise ConfigurationError(f"max_bytes must be >= 1, got {max_bytes}; leave it out for {MAX_BYTES}")
    ticket, place, script = ticket_from_environment(), place_here(), None
    if ticket is None:
        place_of_script()
        require_own_process("join")
        return Mover(0, 1, None, None, None, max_bytes)
    if place is None:
        from flockstep.frameworks.job import import_components

        import_components(ticket.imports)
        claim_ticket()
        script = ScriptPlace(ticket)
        place = Place(script.member, lambda name, value: None)
        take_place(place)
    elif place.member.closed:
        raise ConfigurationError(
            "this process has left the run; call flockstep.join after flockstep.distribute and before finish()"
        )
    elif place.mover is not None:
        raise ConfigurationError("this process has joined already; call flockstep.join once in a script")
    try:
        beside = sockets_beside(place.member, max_bytes)
    except FlockstepError as error:
        if script is not None:
            script.fail(error)
        raise
    return Mover(ticket.address, ticket.workers, beside, place, script, max_bytes)


@dataclass(frozen=True, eq=False)
class Request:
    """What another rank asks: answer it with `mover.reply`."""

    source: int
    name: str
    array: Array | None
    message: Message


class Mover(Collectives):
    """Moves arrays between the ranks of a run; every method may be called from any thread. Made by `flockstep.join`."""

    def __init__(
        self,
        rank: int,
        workers: int,
        beside: Member | None,
        place: Place | None,
        script: ScriptPlace | None,
        max_bytes: int,
    ):
        """For `join`; without `beside` it is alone."""
        super().__init__(Pump(rank, workers, beside, self._hear), max_bytes)
        self._beside = beside
        self._place = place
        self._script = script
        self._servers: dict[str, Server] = {}
        self._unserved: set[str] = set()
        self._closing = False
        self._pump.start()
        if place is not None:
            place.mover = self.close
        atexit.register(self._at_exit)

    def send(self, to: int, name: str, array: Any, codec: str | Codec | None = None) -> None:
        """Send an array to a rank under a name; it may change afterwards. Arrays of one name arrive in order.

        Waits only while much is under way to that rank already.

        Raises:
            ConfigurationError: no such rank, or an array that cannot travel.
            PeerLost: that rank has left, or is dead.
        """
        self.check_rank(to)
        packet = self.packet(checked(array, self.max_bytes), codec)
        self.post(to, SEND + named(name) + "/", packet.data, packet.note)

    def receive(self, name: str, source: int | None = None, timeout: float | None = None) -> Array:
        """The next array of that name from `source` (None: from anyone), as its sender had it, or as decoded.

        Raises:
            PeerLost: the source has left, or is dead, and there is no such array.
            ProtocolError: what arrived does not go together.
            TimedOut: none has come within `timeout` seconds.
        """
        return self.receive_from(name, source, timeout)[1]

    def receive_from(self, name: str, source: int | None = None, timeout: float | None = None) -> tuple[int, Array]:
        """The same, and who has sent it."""
        if source is not None:
            self.check_rank(source)
        message = self.run(lambda me: me.receive(SEND + named(name), source), timeout, f"{name!r}")
        return message.source, unpacked(message, self.max_bytes)

    def request(
        self, to: int, name: str, array: Any = None, codec: str | Codec | None = None, timeout: float | None = None
    ) -> Array | None:
        """Ask a rank for what goes by that name there, which `array` may be needed for; its answer.

        Raises:
            RunError: that rank's handler has raised an error, which is named.
            PeerLost: it has left, or is dead.
            TimedOut: it has not answered within `timeout` seconds.
        """
        self.check_rank(to)
        packet = None if array is None else self.packet(checked(array, self.max_bytes), codec)
        data, note = (None, {}) if packet is None else (packet.data, packet.note)
        what = f"the reply of worker {to} to {name!r}"
        message = self.asked(to, REQUEST + named(name) + "/", data, note, timeout, what)
        return None if message.array is None else unpacked(message, self.max_bytes)

    def serve(self, name: str, handler: Handler) -> None:
        """Let `handler(source, array)` answer what is asked under that name: an array, or None.

        It is called on a thread of its own, once at a time; what it raises is raised by the one who asked. What was
        asked before is answered now.
        """
        server = Server(named(name), handler, self._handle)
        with self._lock:
            if name in self._servers:
                raise ConfigurationError(f"{name!r} is served already; choose another name")
            self._servers[name] = server

        def look() -> None:
            for message in list(self._pump.party.arrived(REQUEST + name + "/")):
                server.take(message)

        self._pump.ask(look)

    def next_request(self, name: str, source: int | None = None, timeout: float | None = None) -> Request:
        """The next request under a name that nothing serves; answer it with `reply`.

        Raises:
            PeerLost: the source has left, or is dead.
            TimedOut: none has come within `timeout` seconds.
        """
        message = self.run(lambda me: me.receive(REQUEST + named(name), source), timeout, f"a request for {name!r}")
        array = None if message.array is None else unpacked(message, self.max_bytes)
        return Request(message.source, name, array, message)

    def reply(self, request: Request, array: Any = None, codec: str | Codec | None = None) -> None:
        """Answer a request, with an array or with nothing."""
        self._reply(request.message, array, codec)

    def shared(self, shape: int | Sequence[int], dtype: str = "float32", timeout: float | None = None) -> Array:
        """An array of zeros in memory that all ranks of this host reach; all call it, with the same shape and dtype.

        `all_reduce(array, out=array)` adds up in place, from one thread at a time and in the same order on all ranks; a
        window on it needs no messages: what it is told to do is done at once. It lives as long as the mover.

        Raises:
            CompositionError: the ranks are not on one host.
            ConfigurationError: the dtype is not float32 or float64, the shapes differ, or it is larger than max_bytes.
        """
        wanted = (shape,) if isinstance(shape, int) else tuple(shape)
        if array_bytes(wanted, dtype) > self.max_bytes:
            raise ConfigurationError(
                f"a shared array has at most {self.max_bytes} bytes, got shape {wanted}; join with more max_bytes"
            )
        size = segment_bytes(self.workers, wanted, dtype)
        self.agree(f"a shared array of {dtype} {wanted}", timeout)
        memory, address = None, np.empty(0, np.uint8)
        if self.rank == 0:
            memory = SharedMemory.create(size)
            address = np.frombuffer(memory.address.encode(), np.uint8)
        address = self.broadcast(address, timeout=timeout)
        failure: CompositionError | None = None
        try:
            memory = memory or attached(bytes(address[:200]).decode(errors="replace"), size)
        except CompositionError as error:
            failure = error
        here = self.all_gather(np.array([failure is None]), timeout=timeout)
        if memory is None or not all(map(np.all, here)):
            raise failure or CompositionError("another rank cannot attach to shared memory; use arrays of your own")
        found = SharedArray(memory, self, wanted, dtype)
        self._shared[id(found.local)] = found
        return found.local

    def window(self, name: str, array: Array, timeout: float | None = None) -> Window:
        """Let all ranks read, write and add to `array`, which stays where it is; all have to call it.

        Raises:
            ConfigurationError: shape or dtype differ between ranks, or the array is not writable and contiguous.
        """
        if not (array.flags.c_contiguous and array.flags.writeable):
            raise ConfigurationError("a window needs a numpy array that is contiguous and writable; pass a copy of it")
        checked(array, self.max_bytes)
        shared = self._shared.get(id(array))
        if isinstance(shared, SharedArray):
            window: Window = SharedWindow(self, named(name), shared)
        else:
            window = Window(self, named(name), array)
        with self._lock:
            if name in self._windows:
                raise ConfigurationError(f"there is a window {name!r} already; close it first, or choose another name")
            self._windows[name] = window
        try:
            self.agree(f"window {name!r} of {array.dtype} {array.shape}", timeout)
        except FlockstepError:
            self.forget(window)
            raise
        return window

    def close(self, timeout: float | None = None) -> None:
        """Leave: nothing can be asked of this mover any more. Others are served until they close theirs too.

        In a script without a strategy the process's part in the run ends with it.

        Raises:
            TimedOut: the others have not closed theirs within `timeout` seconds; this one is closed all the same.
            Interrupted: the run was ended.
        """
        self.require_free()
        with self._lock:
            if self._closing:
                return
            self._closing = True
        atexit.unregister(self._at_exit)
        try:
            if self._pump.failure is None:
                self.run(self._leave, timeout, "the others to close their movers")
        finally:
            self._end(LINGER)
        if self._script is not None:
            self._script.finish(self._pump.account)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close; after an error only once the process ends, so that nobody hears of the end before the error."""
        if kind is None or self._beside is None:
            self.close()

    def _hear(self, message: Message) -> bool:
        """On the mover's thread: do what others ask without this rank's doing anything."""
        if message.reply_to:
            return False
        if message.tag in (PUT, ADD, GET, FAILED):
            window, party = self._windows.get(str(message.note.get("window"))), self._pump.party
            if isinstance(window, Window):
                window.hear(message, party)
            elif message.tag == GET:
                party.reply(message, None, {"error": f"{node_name(self.rank)} has closed that window"})
            return True
        if not message.tag.startswith(REQUEST):
            return False
        name = message.tag.removeprefix(REQUEST).removesuffix("/")
        if name in self._servers:
            self._servers[name].take(message)
        elif self._closing:
            self._refuse(message)
        else:
            self._unserved.add(name)
            return False
        return True

    def _handle(self, message: Message, handler: Handler, name: str) -> None:
        """Answer a request with what a handler says; on that handler's thread."""
        try:
            given = None if message.array is None else unpacked(message, self.max_bytes)
            self._reply(message, handler(message.source, given), None)
        except Exception as error:  # noqa: BLE001 - it is for the one who asked
            text = f"{node_name(self.rank)} could not answer {name!r}: {in_short(error)}"
            self._pump.ask(lambda: self._pump.party.reply(message, None, {"error": text[:LONGEST]}))

    def _reply(self, message: Message, array: Any, codec: str | Codec | None) -> None:
        """Answer a request; from any thread."""
        packet = None if array is None else self.packet(checked(array, self.max_bytes), codec, "replies")
        data, note = (None, {}) if packet is None else (packet.data, packet.note)
        self._pump.ask(lambda: self._pump.party.reply(message, data, note))

    def _refuse(self, message: Message) -> None:
        self._pump.party.reply(message, None, {"error": f"{node_name(self.rank)} has left without an answer"})

    async def _leave(self, me: Party) -> None:
        for name in self._unserved:
            for message in me.arrived(REQUEST + name):
                self._refuse(message)
        for rank in me.others:
            me.send(rank, CLOSING)
        for rank in me.others:
            with suppress(PeerLost):  # which is how it is told that nothing more will come
                await me.receive("word", rank)

    def _end(self, seconds: float) -> None:
        self._pump.stop()
        for server in self._servers.values():
            server.stop()
        if self._beside is not None:
            self._beside.close(LOST_LINGER if self._pump.party.lost else seconds)
            account = self._pump.account
            if self._place is not None:
                self._place.figure("mover_sent", account.traffic.sent_bytes)
                self._place.figure("mover_messages", account.traffic.messages_sent)

    def _at_exit(self) -> None:
        """A script that does not close still leaves properly, unless it is failing."""
        with suppress(FlockstepError):  # the supervisor has been told
            if getattr(sys, "last_value", None) is None:
                self.close()


class Server:
    """Answers the requests of one name, one after the other, on a thread of its own."""

    def __init__(self, name: str, handler: Handler, handle: Callable[[Message, Handler, str], None]):
        """`handle` takes the request, the handler and the name, and raises nothing."""
        self._queue: SimpleQueue[Message | None] = SimpleQueue()

        def run() -> None:
            while (message := self._queue.get()) is not None:
                handle(message, handler, name)

        Thread(target=run, name=f"flockstep-serve-{name}", daemon=True).start()

    def take(self, message: Message) -> None:
        """One more request."""
        self._queue.put(message)

    def stop(self) -> None:
        """End after what is here by now."""
        self._queue.put(None)
