"""The progress engine: a thread that moves a rank's messages while the threads of its process compute, or wait."""

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

from flockstep.communicator.rank import Rank
from flockstep.drivers.messenger import RETRY, Messenger, Receive
from flockstep.drivers.runner import Runner
from flockstep.errors import ConfigurationError, FlockstepError, RunError, TimedOut
from flockstep.messages import BYE, HEADER_BYTES, Address, Message, frozen
from flockstep.programs import completed
from flockstep.transports.bus import Bus, Traffic

T = TypeVar("T")
AHEAD = 1 << 26
"""Bytes that a thread may have handed over for one rank, and that the bus has not taken, before the thread waits."""
LOOK = 1.0
"""Seconds after which it is looked whether connections stand."""


class Alone:
    """The sockets, and the bus, of a script that nobody launched: there are no peers."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.bus: Any = self
        self.lend = frozen

    def receive(self, seconds: float | None, also: int | None = None) -> Message | None:
        """Wait until `also` can be read."""
        select.select([] if also is None else [also], [], [], seconds)
        return None

    def broken(self, seconds: float) -> set[Address]:
        """None of them."""
        return set()

    def close(self, linger: float) -> None:
        """Nothing is open."""


class ProgressEngine(Messenger):
    """Owns a rank and its sockets; the threads of the process hand over what to send, and which calls to make."""

    node: Rank

    def __init__(self, bus: Bus, receive: Receive, node: Rank, patience: float):
        """`patience`: seconds for which a connection may be broken before its rank counts as dead."""
        super().__init__(bus, receive, node, None)
        self.failure: FlockstepError | None = None
        """Why nothing goes on any more."""
        self._refusal: FlockstepError | None = None
        self._patience = patience
        self.asked: deque[Callable[[], None]] = deque()
        """What is still to be done on the engine's thread."""
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
        """Have something done on the engine's thread, after all that was asked before; does not wait."""
        self.asked.append(action)
        if not self._signalled:
            self._signalled = True
            with contextlib.suppress(OSError):  # it is signalled already, or nobody listens any more
                self._waker.send(b"!")
        if self._over:
            self._do()

    def post(self, to: Address, nbytes: int, send: Callable[[], None]) -> None:
        """Have so much sent to a rank; waits while much waits for that rank already.

        Raises:
            ConfigurationError: the communicator was closed before it could be sent.
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
        """Start a call; one in a channel is part of what all ranks do there, and `what` is what they agree on."""
        future: Future[T] = Future()

        def begin() -> None:
            if self.failure is None:
                self.node.begin(program, future, channel, what)
            else:
                future.set_exception(self.failure)

        self.ask(begin)
        return future

    def wait(self, future: Future[T], timeout: float | None, what: str) -> T:
        """What a call returns.

        Raises:
            TimedOut: it has not ended within `timeout` seconds, and was given up.
        """
        if current_thread() is self._thread:
            raise ConfigurationError(f"{what} would wait for itself on the engine's own thread; call it on another")
        try:
            return future.result(timeout)
        except TimeoutError:
            if future.done():
                return future.result()  # its own error, or it has ended just now
        error = TimedOut(f"worker {self.node.rank} waited {timeout:g} s for {what}; the others may be late or stopped")
        self.ask(lambda: self.node.give_up(future, error))
        return future.result()

    async def flush(self) -> None:
        """Return once nothing waits for room; threads that would send more are refused from now on."""
        self._refuse(closed())
        await completed(_Flushed(self))

    def undelivered(self) -> dict[Address, int]:
        """How many bytes wait for the ranks that are still there."""
        there = [rank for rank in self.node.others if rank not in self.node.departed]
        held = {rank: sum(message.payload_bytes for message in self._held.get(rank, ())) for rank in there}
        found = {rank: held[rank] + self._bus.waiting(rank) for rank in there}
        return {rank: nbytes for rank, nbytes in found.items() if nbytes or rank in self._held}

    def stop(self) -> None:
        """End the thread; every call that is under way, and all that come, are refused."""

        def last() -> None:
            self.node.send_all(self.node.others, BYE)
            self._end(closed())

        self.ask(last)
        self._thread.join()
        self._waker.close()
        self._woken.close()

    def drive(self, runner: Runner) -> None:
        """Do what is asked, and deliver what arrives, until there is nothing more to do."""
        while self.failure is None:
            busy = self.node.poll() or self._held
            message = self._receive(RETRY if busy else LOOK, self._woken.fileno())
            if message is not None:
                self.take(message)
            self._look()
            if self._signalled or message is None:  # a byte may come after it was looked for
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(64)
                self._signalled = False
            self._do()

    def send(self, to: Address, message: Message) -> None:
        """Send, or let wait: other calls go on meanwhile."""
        self.hand_over(to, message)

    def note_loss(self, address: Address, reason: str) -> None:
        """The others may go on among themselves."""
        self.node.reasons[address] = reason

    def _work(self) -> None:
        try:
            self.drive(self.runner)
        except FlockstepError as error:
            self._end(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may wait for this thread for ever
            failure = RunError(f"the communicator of worker {self.node.rank} failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._end(failure)
        self._over = True
        self._do()  # calls that came too late hear of it

    def _do(self) -> None:
        for _ in range(len(self.asked)):
            try:
                action = self.asked.popleft()
            except IndexError:  # after the end, several threads may look here
                return
            action()

    def _look(self) -> None:
        """Send what waited; take a rank for lost whose connection broke though the supervisor knows of no death."""
        for peer in self._bus.broken(self._patience) - self.node.departed:
            self.note_loss(peer, f"the connection to worker {peer} broke")
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
        """Nothing goes on after this; every call that is under way ends with `error`."""
        self._refuse(error)
        self.failure = self.failure or error
        self.node.give_up_all(self.failure)


@dataclass
class _Flushed:
    """Whether all that was sent has been given to the system."""

    engine: ProgressEngine

    def done(self) -> bool:
        """Whether it has by now."""
        return not (self.engine.asked or self.engine.undelivered())

    def wait(self, seconds: float) -> bool:
        """Nobody waits for it but the engine itself."""
        return self.done()


def closed() -> ConfigurationError:
    """The error of a call that comes too late."""
    return ConfigurationError("this communicator is closed; use it before close(), or inside its with block")
