"""The communicator of a script: any array from any rank to any other, encoded as asked, from any thread."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from flockstep.codecs.base import Codec
from flockstep.communicator.calls import named
from flockstep.communicator.collectives import Collectives
from flockstep.communicator.encoded import REQUEST, SEND, Answer, Encoded, checked, unpacked
from flockstep.communicator.engine import ProgressEngine
from flockstep.communicator.rank import Rank
from flockstep.communicator.requests import Handler, Request, Server
from flockstep.communicator.shared_arrays import SharedArray, SharedWindow, array_bytes, attached, segment_bytes
from flockstep.communicator.window import Window
from flockstep.drivers.member import in_short
from flockstep.drivers.place import Place
from flockstep.errors import CompositionError, ConfigurationError, FlockstepError, TimedOut
from flockstep.messages import Array, Message, node_name
from flockstep.transports.bus import Bus
from flockstep.transports.shared_memory import SharedMemory

MAX_BYTES = 1 << 30
"""The largest array, in bytes, that a communicator takes unless it is told otherwise."""
LINGER, LOST_LINGER = 2.0, 0.3
"""Seconds in which what was sent last is still delivered after the end; the same if a rank is dead."""
LONGEST = 4000
"""Characters of an error that travel."""


class Sockets(Protocol):
    """What a communicator sends and receives by."""

    bus: Bus

    def receive(self, seconds: float | None, also: int | None = None) -> Message | None:
        """The next message, from anyone; None if there is none within that time, or `also` can be read."""

    def close(self, linger: float) -> None:
        """Leave; what was sent is still delivered within `linger` seconds."""


class Communicator(Collectives):
    """Moves arrays between the ranks of a run; any thread may call its methods. Made by `flockstep.join`."""

    def __init__(
        self,
        node: Rank,
        sockets: Sockets,
        max_bytes: int,
        patience: float = 0.0,
        place: Place | None = None,
    ):
        """For `join`.

        Args:
            patience: seconds for which a connection may be broken before its rank counts as dead.
            place: the process's part in a run; None: nobody launched it.
        """
        super().__init__(ProgressEngine(sockets.bus, sockets.receive, node, patience), max_bytes)
        self._sockets, self._place = sockets, place
        self._servers: dict[str, Server] = {}
        self._arrays: dict[int, SharedArray] = {}
        self._closing = False
        if place is not None:
            place.close_communicator = self.close
        atexit.register(self._at_exit)

    def send(self, to: int, name: str, array: Any, codec: str | Codec | None = None) -> None:
        """Send an array to a rank under a name; it may change afterwards. Arrays of one name arrive in order.

        Waits only while much is under way to that rank already.

        Raises:
            ConfigurationError: no such rank, or an array that cannot travel.
            PeerLost: that rank has left, or is dead.
        """
        self.check_rank(to)
        packet = self.packet(array, codec)
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
        message = self.run(lambda me: me.receive(SEND + named(name), source), timeout, repr(name))
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
        data, note = self.packet_or_nothing(array, codec, Encoded)
        what = f"the reply of worker {to} to {name!r}"
        message = self.asked(to, REQUEST + named(name) + "/", data, note, timeout, what)
        return None if message.array is None else unpacked(message, self.max_bytes)

    def serve(self, name: str, handler: Handler) -> None:
        """Let `handler(source, array)` answer what is asked under that name: an array, or None.

        It is called on a thread of its own, once at a time; what it raises is raised by the one who asked. What was
        asked before is answered now.
        """
        with self._lock:
            if name in self._servers:
                raise ConfigurationError(f"{name!r} is served already; choose another name")
            server = self._servers[name] = Server(named(name), lambda message: self._handle(message, handler, name))
        self._engine.ask(lambda: self._engine.node.handle(f"{REQUEST}{name}/", server.take))

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
        window on it needs no messages: what it is told to do is done at once. It lives as long as the communicator.

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
        self._arrays[id(found.local)], self._sums[id(found.local)] = found, found.all_reduce
        return found.local

    def window(self, name: str, array: Array, timeout: float | None = None) -> Window:
        """Let all ranks read, write and add to `array`, which stays where it is; all have to call it.

        Raises:
            ConfigurationError: shape or dtype differ between ranks, or the array is not writable and contiguous.
        """
        if not (array.flags.c_contiguous and array.flags.writeable):
            raise ConfigurationError("a window needs a numpy array that is contiguous and writable; pass a copy of it")
        checked(array, self.max_bytes)
        shared, node = self._arrays.get(id(array)), self._engine.node
        window = Window(self, named(name), array) if shared is None else SharedWindow(self, named(name), shared)
        with self._lock:
            if window.tag in self._holders:
                raise ConfigurationError(f"there is a window {name!r} already; close it first, or choose another name")
            self._holders[window.tag] = window.held_here
        self._engine.ask(lambda: node.handle(window.tag, lambda message: window.hear(message, node)))
        try:
            self.agree(f"window {name!r} of {array.dtype} {array.shape}", timeout)
        except FlockstepError:
            self.forget(window.tag)
            raise
        return window

    def close(self, timeout: float | None = None) -> None:
        """Leave: nothing can be asked of this communicator any more. Others are served until they close theirs too.

        What was sent is delivered first. In a script without a strategy the process's part in the run ends with it.

        Raises:
            TimedOut: the others have not closed theirs, or not taken what was sent to them, within `timeout` seconds;
                this one is closed all the same.
            Interrupted: the run was ended.
        """
        self.require_free()
        with self._lock:
            if self._closing:
                return
            self._closing = True
        atexit.unregister(self._at_exit)
        late, waiting = "", {}
        try:
            if self._engine.failure is None:
                self.run(self._leave, timeout, "the others to take what was sent, and to close their communicators")
        except TimedOut as error:
            late = str(error)
        finally:
            waiting = self._end()
        if late:
            lost = [f"; {nbytes} bytes for worker {rank} were not delivered" for rank, nbytes in waiting.items()]
            raise TimedOut(late + "".join(lost))
        if self._place is not None:
            self._place.finish(self._engine.runner.account)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close; after an error only once the process ends, so that nobody hears of the end before the error."""
        if kind is None or self._place is None:
            self.close()

    async def _leave(self, me: Rank) -> None:
        await me.leave()
        await self._engine.flush()

    def _handle(self, message: Message, handler: Handler, name: str) -> None:
        """Answer a request with what a handler says; on that handler's thread."""
        try:
            given = None if message.array is None else unpacked(message, self.max_bytes)
            self._reply(message, handler(message.source, given), None)
        except Exception as error:  # noqa: BLE001 - it is for the one who asked
            answer = Answer(error=f"{node_name(self.rank)} could not answer {name!r}: {in_short(error)}"[:LONGEST])
            self._engine.ask(lambda: self._engine.node.reply(message, None, answer))

    def _reply(self, message: Message, array: Any, codec: str | Codec | None) -> None:
        """Answer a request; from any thread."""
        data, note = self.packet_or_nothing(array, codec, Answer, "replies")
        self._engine.ask(lambda: self._engine.node.reply(message, data, note))

    def _end(self) -> dict[int, int]:
        """End the engine, and leave; how many bytes could not be delivered, by rank."""
        self._engine.stop()
        for server in self._servers.values():
            server.stop()
        waiting = self._engine.undelivered()
        self._sockets.close(LOST_LINGER if self._engine.node.lost else LINGER)
        return waiting

    def _at_exit(self) -> None:
        """A script that does not close still leaves properly, unless it is failing."""
        with suppress(FlockstepError):  # the supervisor has been told
            if getattr(sys, "last_value", None) is None:
                self.close()
