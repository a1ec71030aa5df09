"""The communicator of a script: any array from any rank to any other, optionally encoded, from any thread."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from flockstep.codecs.base import Codec
from flockstep.communicator.calls import named
from flockstep.communicator.collectives import Collectives
from flockstep.communicator.encoded import REQUEST, SEND, Encoded, Reply, checked, unpacked
from flockstep.communicator.engine import ProgressEngine
from flockstep.communicator.rank import Rank
from flockstep.communicator.shared_arrays import SharedArray, SharedWindow, array_bytes, attached
from flockstep.communicator.window import Window
from flockstep.errors import CompositionError, ConfigurationError, FlockstepError, TimedOut, in_short
from flockstep.links.shared_group import needed
from flockstep.links.shared_memory import SharedMemory
from flockstep.links.streams import StreamBus
from flockstep.messages import Array, Message, node_name
from flockstep.runtime.node_metrics import NodeMetrics

MAX_BYTES = 1 << 30
"""Default size in bytes of the largest array that a communicator accepts."""
LINGER, LOST_LINGER = 2.0, 0.3
"""Seconds for which queued messages may still be delivered: LINGER after the end of a run, LOST_LINGER after the death
of a rank.
"""
LONGEST = 4000
"""Maximum number of characters of an error message that is sent to another rank."""


Handler = Callable[[int, Array | None], Any]
"""Function that answers a request. It receives the rank that asks and the array of the request, and returns an array or
None.
"""


@dataclass(frozen=True, eq=False)
class Request:
    """A request from another rank, to be answered with `reply`."""

    source: int
    name: str
    array: Array | None
    message: Message


class RequestServer:
    """Answers the requests of one name, one after another, on its own thread."""

    def __init__(self, name: str, answer: Callable[[Message], None]):
        """Start the thread that calls `answer` for each request; `answer` must not raise."""
        queue: SimpleQueue[Message | None] = SimpleQueue()
        self.take = queue.put
        """Queues a request for the thread; None ends the thread after it has answered all queued requests."""

        def run() -> None:
            while (message := queue.get()) is not None:
                answer(message)

        Thread(target=run, name=f"flockstep-serve-{name}", daemon=True).start()


class Sockets(Protocol):
    """The sockets with which a communicator sends and receives messages."""

    bus: StreamBus

    def receive(self, seconds: float | None, also: int | None = None) -> Message | None:
        """Return the next message from any rank; None if none arrives within `seconds` or if `also` becomes
        readable.
        """

    def close(self, linger: float) -> None:
        """Leave the run; messages sent before are still delivered within `linger` seconds."""


class Communicator(Collectives):
    """Moves arrays between the ranks of a run; any thread may call its methods. Create it with `flockstep.join`."""

    def __init__(
        self,
        node: Rank,
        sockets: Sockets,
        max_bytes: int,
        patience: float = 0.0,
        finish: Callable[[NodeMetrics], None] | None = None,
    ):
        """Create the communicator; called by `join`.

        Args:
            node: this process's rank.
            sockets: what the communicator sends and receives with.
            max_bytes: size in bytes of the largest array.
            patience: seconds for which a connection may be broken before its rank counts as dead.
            finish: writes the totals to the record when the communicator has ended; None if the script was not
                launched.
        """
        super().__init__(ProgressEngine(sockets.bus, sockets.receive, node, patience), max_bytes)
        self._sockets, self._finish = sockets, finish
        self._servers: dict[str, RequestServer] = {}
        self._arrays: dict[int, SharedArray] = {}
        self._closing = False
        atexit.register(self._at_exit)

    def send(self, to: int, name: str, array: Any, codec: str | Codec | None = None) -> None:
        """Send an array to a rank under a name; the array may change after the call.

        Arrays of the same name arrive in order. The call waits only while many bytes to that rank are already in
        transit.

        Args:
            to: the receiver's rank.
            name: the name under which the receiver asks for the array.
            array: the array, of any shape, or a number or list that numpy converts.
            codec: the codec to encode the array with, or None.

        Raises:
            ConfigurationError: there is no such rank, or the array cannot be sent.
            PeerLost: the rank has left or died.
        """
        self.check_rank(to)
        packet = self.packet(array, codec)
        self.post(to, SEND + named(name) + "/", packet.data, packet.note)

    def receive(self, name: str, source: int | None = None, timeout: float | None = None) -> Array:
        """Return the next array of the given name.

        Args:
            name: the name under which the array was sent.
            source: the sender's rank; None for any rank.
            timeout: seconds to wait; None for no limit.

        Returns:
            A new array with the shape and dtype that the sender's array had, decoded if it was encoded.

        Raises:
            PeerLost: the source has left or died, and no such array has arrived.
            ProtocolError: the received message is inconsistent.
            TimedOut: no array arrived within `timeout` seconds.
        """
        return self.receive_from(name, source, timeout)[1]

    def receive_from(self, name: str, source: int | None = None, timeout: float | None = None) -> tuple[int, Array]:
        """Return the rank of the sender and the next array of the given name."""
        if source is not None:
            self.check_rank(source)
        message = self.run(lambda me: me.receive(SEND + named(name), source), timeout, repr(name))
        return message.source, unpacked(message, self.max_bytes)

    def request(
        self, to: int, name: str, array: Any = None, codec: str | Codec | None = None, timeout: float | None = None
    ) -> Array | None:
        """Send a request of the given name to a rank, and return the answer.

        Args:
            to: the rank to ask.
            name: the name of the request.
            array: an array to send with the request, or None.
            codec: the codec to encode the array with, or None.
            timeout: seconds to wait for the answer; None for no limit.

        Raises:
            RunError: the rank's handler raised an error; the message has its text.
            PeerLost: the rank has left or died.
            TimedOut: the rank did not answer within `timeout` seconds.
        """
        self.check_rank(to)
        data, note = (None, Encoded()) if array is None else self.packet(array, codec)
        what = f"the reply of worker {to} to the request {name!r}"
        message = self.asked(to, REQUEST + named(name) + "/", data, note, timeout, what)
        return None if message.array is None else unpacked(message, self.max_bytes)

    def serve(self, name: str, handler: Handler) -> None:
        """Answer requests of the given name with `handler(source, array)`, which returns an array or None.

        The handler runs on its own thread, one request at a time. An error in the handler is raised in the rank that
        sent the request. Requests that arrived before this call are answered, too.
        """
        with self._lock:
            if name in self._servers:
                raise ConfigurationError(f"this worker already serves requests named {name!r}; choose another name")
            server = self._servers[name] = RequestServer(
                named(name), lambda message: self._handle(message, handler, name)
            )
        self._engine.ask(lambda: self._engine.node.handle(f"{REQUEST}{name}/", server.take))

    def next_request(self, name: str, source: int | None = None, timeout: float | None = None) -> Request:
        """Return the next request of a name that has no handler; answer it with `reply`.

        Raises:
            PeerLost: the source has left or died.
            TimedOut: no request arrived within `timeout` seconds.
        """
        message = self.run(lambda me: me.receive(REQUEST + named(name), source), timeout, f"a request for {name!r}")
        array = None if message.array is None else unpacked(message, self.max_bytes)
        return Request(message.source, name, array, message)

    def reply(self, request: Request, array: Any = None, codec: str | Codec | None = None) -> None:
        """Answer a request with an array, or with None, from any thread."""
        data, note = (None, Encoded()) if array is None else self.packet(array, codec, "replies")
        self._engine.ask(lambda: self._engine.node.reply(request.message, data, note.within(Reply)))

    def shared(self, shape: int | Sequence[int], dtype: str = "float32", timeout: float | None = None) -> Array:
        """Return an array of zeros in memory that all ranks on this host share.

        All ranks call this with the same arguments. `all_reduce(array, out=array)` then sums in place, from one thread
        at a time and in the same order on all ranks. A window on the array needs no messages: its operations are done
        when the call returns. The array lives as long as the communicator.

        Args:
            shape: the array's shape, or its length.
            dtype: "float32" or "float64".
            timeout: seconds to wait for the other ranks; None for no limit.

        Raises:
            CompositionError: the ranks are not on one host.
            ConfigurationError: the dtype is not float32 or float64, the shapes differ, or the array exceeds max_bytes.
        """
        wanted = (shape,) if isinstance(shape, int) else tuple(shape)
        if array_bytes(wanted, dtype) > self.max_bytes:
            raise ConfigurationError(
                f"a shared array may have at most {self.max_bytes} bytes, got shape {wanted}; join with a larger "
                "max_bytes"
            )
        size = needed(self.workers, array_bytes(wanted, dtype))
        self.agree(f"a shared array of shape {wanted} and {dtype}", timeout)
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
            raise failure or CompositionError("other ranks cannot attach to shared memory; use ordinary arrays")
        found = SharedArray(memory, self, wanted, dtype)
        self._arrays[id(found.local)], self._sums[id(found.local)] = found, found.all_reduce
        return found.local

    def window(self, name: str, array: Array, timeout: float | None = None) -> Window:
        """Let all ranks read, write and add to `array`, which is not copied; all ranks must call this.

        Args:
            name: the window's name, the same on all ranks.
            array: this rank's array, of the same shape and dtype on all ranks.
            timeout: seconds to wait for the other ranks; None for no limit.

        Raises:
            ConfigurationError: shape or dtype differ between ranks, or the array is not writable and contiguous.
        """
        if not (array.flags.c_contiguous and array.flags.writeable):
            raise ConfigurationError("a window needs a contiguous and writable numpy array; pass a copy of the array")
        checked(array, self.max_bytes)
        shared, node = self._arrays.get(id(array)), self._engine.node
        window = Window(self, named(name), array) if shared is None else SharedWindow(self, named(name), shared)
        with self._lock:
            if window.tag in self._holders:
                raise ConfigurationError(
                    f"a window named {name!r} is open already; close that window first, or choose another name"
                )
            self._holders[window.tag] = window.held_here
        self._engine.ask(lambda: node.handle(window.tag, lambda message: window.hear(message, node)))
        try:
            self.agree(f"window {name!r} of {array.dtype} {array.shape}", timeout)
        except FlockstepError:
            self.forget(window.tag)
            raise
        return window

    def close(self, timeout: float | None = None) -> None:
        """Close this communicator: it accepts no more calls, but answers other ranks until they close theirs, too.

        Everything sent before is delivered first. In a script without a strategy, the process's part in the run ends
        here.

        Raises:
            TimedOut: within `timeout` seconds, other ranks did not close their communicators or did not receive what
                was sent to them; this communicator is closed nevertheless.
            Interrupted: the run was ended.
        """
        self.require_free()
        with self._lock:
            if self._closing:
                return
            self._closing = True
        atexit.unregister(self._at_exit)
        late, waiting = "", {}

        async def leave(me: Rank) -> None:
            await me.leave()
            await self._engine.flush()

        try:
            if self._engine.failure is None:
                what = "all other ranks to receive their messages and to close their communicators"
                self.run(leave, timeout, what)
        except TimedOut as error:
            late = str(error)
        finally:
            self._engine.stop()
            for server in self._servers.values():
                server.take(None)
            waiting = self._engine.undelivered()
            self._sockets.close(LOST_LINGER if self._engine.node.lost else LINGER)
        if late:
            lost = [f"; {nbytes} bytes were not delivered to worker {rank}" for rank, nbytes in waiting.items()]
            raise TimedOut(late + "".join(lost))
        if self._finish is not None:
            self._finish(self._engine.runner.metrics)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close; after an error only when the process ends, so that the error is reported before the end."""
        if kind is None or self._finish is None:
            self.close()

    def _handle(self, message: Message, handler: Handler, name: str) -> None:
        """Answer a request with the handler's result, on the handler's thread."""
        try:
            given = None if message.array is None else unpacked(message, self.max_bytes)
            self.reply(Request(message.source, name, given, message), handler(message.source, given))
        except Exception as error:  # noqa: BLE001 - raised in the rank that asked
            answer = Reply(error=f"{node_name(self.rank)} could not answer {name!r}: {in_short(error)}"[:LONGEST])
            self._engine.ask(lambda: self._engine.node.reply(message, None, answer))

    def _at_exit(self) -> None:
        """Close the communicator of a script that did not, unless the script is failing."""
        with suppress(FlockstepError):  # already reported to the supervisor
            if getattr(sys, "last_value", None) is None:
                self.close()
