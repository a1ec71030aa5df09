"""The progress engine: a thread that sends and receives a rank's messages while the other threads of the process
compute or wait.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Condition, Thread, current_thread
from typing import Any, TypeVar

from flockstep import nodes
from flockstep.communicator.rank import Rank
from flockstep.errors import ConfigurationError, FlockstepError, RunError, TimedOut
from flockstep.links.bus import Traffic
from flockstep.links.streams import StreamBus
from flockstep.messages import HEADER_BYTES, LEAVE, Address, Message, frozen
from flockstep.programs import completed
from flockstep.runtime.messenger import RETRY, Messenger, Receive
from flockstep.runtime.runner import Runner

T = TypeVar("T")
AHEAD = 1 << 26
"""Limit on the bytes pending for one rank; at the limit, threads that send to the rank wait."""
LOOK = 1.0
"""Seconds between two checks for broken connections."""


class Alone:
    """Replaces the sockets and the bus in a script that no launcher has started, which has no peers."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.bus: Any = self
        self.copy_for_sending = frozen

    def receive(self, seconds: float | None, also: int | None = None) -> Message | None:
        """Wait until `also` becomes readable, because no message can arrive."""
        select.select([] if also is None else [also], [], [], seconds)
        return None

    def broken(self, seconds: float) -> set[Address]:
        """Return an empty set, because there are no connections that could break."""
        return set()

    def close(self, linger: float) -> None:
        """Do nothing, because no socket is open."""


class ProgressEngine(Messenger):
    """Owns a rank and its sockets; the threads of the process submit messages and calls to the engine."""

    node: Rank
    _bus: StreamBus

    def __init__(self, bus: StreamBus, receive: Receive, node: Rank, patience: float):
        """Start the engine's thread.

        Args:
            bus: the bus to send with.
            receive: returns the next message.
            node: the rank.
            patience: seconds for which a connection may be broken before its rank counts as dead.
        """
        super().__init__(bus, receive, node, None)
        self.failure: FlockstepError | None = None
        """The error that ended the engine; None while it works."""
        self._refusal: FlockstepError | None = None
        self._patience = patience
        self.asked: deque[Callable[[], None]] = deque()
        """Actions still to be run on the engine's thread."""
        self._room = Condition()
        self._handed: Counter[Address] = Counter()
        self._waker, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._signalled = False
        self._over = False
        self._thread = Thread(target=self._work, name=f"flockstep-communicator-{node.rank}", daemon=True)
        self._thread.start()

    def ask(self, action: Callable[[], None]) -> None:
        """Queue an action to run on the engine's thread after all earlier actions; return without waiting."""
        self.asked.append(action)
        if not self._signalled:
            self._signalled = True
            with contextlib.suppress(OSError):  # already signaled, or the engine has ended
                self._waker.send(b"!")
        if self._over:
            self._do()

    def post(self, to: Address, nbytes: int, send: Callable[[], None]) -> None:
        """Send a message of `nbytes` bytes to a rank; wait while many bytes for that rank are pending.

        Raises:
            ConfigurationError: the communicator was closed before the message could be sent.
        """
        with self._room:
            while self._refusal is None and not self.node.gone(to):
                if self._handed[to] < AHEAD and to not in self._held:
                    break
                self._room.wait()
            if self._refusal is not None:
                raise self._refusal
            self._handed[to] += (size := nbytes + HEADER_BYTES)

            def action() -> None:
                with self._room:
                    self._handed[to] -= size
                    self._room.notify_all()
                send()

            self.ask(action)

    def start(self, program: Callable[[Rank], Awaitable[T]], channel: str = "", what: str = "") -> Future[T]:
        """Start a call, and return a future of its result. In a collective call `channel` identifies the call, and all
        ranks must pass the same `what`.
        """
        future: Future[T] = Future()

        def begin() -> None:
            if self.failure is None:
                self.node.begin(program, future, channel, what)
            else:
                future.set_exception(self.failure)

        self.ask(begin)
        return future

    def wait(self, future: Future[T], timeout: float | None, what: str) -> T:
        """Wait for the result of a call, and return it.

        Raises:
            TimedOut: the call did not end within `timeout` seconds, and was canceled.
        """
        if current_thread() is self._thread:
            raise ConfigurationError(
                f"{what} was called on the engine's own thread and would wait forever; call it on another thread"
            )
        try:
            return future.result(timeout)
        except TimeoutError:
            if future.done():
                return future.result()  # the call's own error, or the call has just ended
        error = TimedOut(
            f"worker {self.node.rank} waited {timeout:g} s for {what}; other ranks may be late or stopped, or the "
            "timeout may be too short"
        )
        self.ask(lambda: self.node.give_up(future, error))
        return future.result()

    async def flush(self) -> None:
        """Return once no message waits to be sent; threads that send from now on get an error."""
        self._refuse(closed())
        await completed(_Flushed(self))

    def undelivered(self) -> dict[Address, int]:
        """Return the number of bytes pending for each rank that has not left."""
        there = [rank for rank in self.node.others if rank not in self.node.departed]
        held = {rank: sum(message.payload_bytes for message in self._held.get(rank, ())) for rank in there}
        found = {rank: held[rank] + self._bus.waiting(rank) for rank in there}
        return {rank: nbytes for rank, nbytes in found.items() if nbytes or rank in self._held}

    def stop(self) -> None:
        """End the thread; calls in progress and later calls raise an error."""

        def last() -> None:
            self.node.send_all(self.node.others, LEAVE)
            self._end(closed())

        self.ask(last)
        self._thread.join()
        self._waker.close()
        self._woken.close()

    def drive(self, runner: Runner) -> None:
        """Run actions and deliver messages until the engine has ended."""
        while self.failure is None:
            busy = nodes.poll(self.node) or self._held
            message = self._receive(RETRY if busy else LOOK, self._woken.fileno())
            if message is not None:
                self.take(message)
            self._look()
            if self._signalled or message is None:  # a byte may arrive after the check
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(64)
                self._signalled = False
            self._do()

    def send(self, to: Address, message: Message) -> None:
        """Send a message. If the bus has no room, the message is queued, and other calls continue."""
        self.transmit(to, message)

    def note_loss(self, address: Address, reason: str) -> None:
        """Record why a rank was lost; the other ranks may continue."""
        self.node.reasons[address] = reason

    def _work(self) -> None:
        try:
            self.drive(self.runner)
        except FlockstepError as error:
            self._end(error)
        except Exception as error:  # noqa: BLE001 - after any error, no thread may wait for this one
            failure = RunError(f"the communicator of worker {self.node.rank} failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._end(failure)
        self._over = True
        self._do()  # late calls get the error

    def _do(self) -> None:
        for _ in range(len(self.asked)):
            try:
                action = self.asked.popleft()
            except IndexError:  # after the end, several threads may look here
                return
            action()

    def _look(self) -> None:
        """Retry pending messages; mark ranks as lost whose connection is broken, even if the supervisor reports no
        death.
        """
        for peer in self._bus.broken(self._patience) - self.node.departed:
            self.note_loss(peer, self._bus.why_broken(peer))
            self.runner.lose(peer)
        if self._held:
            self.retry()
        with self._room:
            self._room.notify_all()

    def _sent(self, to: Address, message: Message) -> bool:
        return self.failure is not None or to in self.node.departed or super()._sent(to, message)

    def _refuse(self, error: FlockstepError) -> None:
        with self._room:
            self._refusal = self._refusal or error
            self._room.notify_all()

    def _end(self, error: FlockstepError) -> None:
        """End the engine: every call in progress ends with `error`."""
        self._refuse(error)
        self.failure = self.failure or error
        self.node.give_up_all(self.failure)


@dataclass
class _Flushed:
    """An operation that is done once everything sent has been given to the operating system."""

    engine: ProgressEngine

    def done(self) -> bool:
        """Whether everything has been given to the operating system."""
        return not (self.engine.asked or self.engine.undelivered())

    def wait(self, seconds: float) -> bool:
        """Return `done()`: only the engine itself waits for this."""
        return self.done()


def closed() -> ConfigurationError:
    """Return the error to raise in a call after the communicator was closed."""
    return ConfigurationError("this communicator is closed; make all calls before close(), or inside its with block")
