"""The thread of a mover: it owns the sockets, and lets the calls of all other threads go on."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from threading import Condition, Thread, current_thread
from typing import Any, TypeVar

from flockstep.drivers.account import Account
from flockstep.drivers.member import Member, stopped
from flockstep.drivers.mover_node import Party
from flockstep.errors import ConfigurationError, FlockstepError, PeerLost, RunError, TimedOut
from flockstep.messages import BYE, Address, Message
from flockstep.programs import Task
from flockstep.transports.bus import LAUNCHER, Backlog

T = TypeVar("T")
AHEAD = 1 << 26
"""Bytes that may be on their way to one rank before whoever sends more has to wait."""
TOLD_EVERY = 1 << 20
"""Bytes after whose arrival a receiver tells their sender."""
ARRIVED = "arrived"
"""Tag of what it tells."""
AT_ONCE = 64
"""Messages that are taken in before it is looked at what threads have asked for."""
LOOK = 1.0
"""Seconds after which it is looked whether connections stand."""
RETRY = 0.005
"""Seconds after which a peer that took nothing is tried again."""


class Flow:
    """How much is on its way to each rank, so that memory stays bounded however fast a thread sends."""

    def __init__(self) -> None:
        self._under_way: dict[Address, int] = {}
        self._change = Condition()
        self._end: FlockstepError | None = None

    def take(self, to: Address, nbytes: int, gone: Callable[[Address], bool], deadline: float | None) -> None:
        """Wait until there is room.

        Raises:
            TimedOut: there was none in time.
        """
        with self._change:
            while self._end is None and self._under_way.get(to, 0) >= AHEAD and not gone(to):
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimedOut(f"worker {to} has not taken what was sent to it before in time; it may be stopped")
                self._change.wait(left)
            if self._end is not None:
                raise self._end
            self._under_way[to] = self._under_way.get(to, 0) + nbytes

    def give(self, to: Address, nbytes: int) -> None:
        """So much has arrived there."""
        with self._change:
            self._under_way[to] = self._under_way.get(to, 0) - nbytes
            self._change.notify_all()

    def look(self) -> None:
        """A rank has gone: nobody needs to wait for it."""
        with self._change:
            self._change.notify_all()

    def end(self, error: FlockstepError) -> None:
        """Nothing more can be sent."""
        with self._change:
            self._end = error
            self._change.notify_all()


class Pump:
    """Moves a party's messages on a thread of its own; without a member there is nobody but oneself."""

    def __init__(self, rank: int, workers: int, member: Member | None, hear: Callable[[Message], bool]):
        self.party = Party(rank, workers, 0 if member is None else member.ticket.seed, self, self._hears)
        self.account = Account(rank, None, None if member is None else member.bus.traffic)
        self.flow = Flow()
        self.failure: FlockstepError | None = None
        self._hear = hear
        self._member = member
        self._asked: deque[Callable[[], None]] = deque()
        self._open: dict[Future[Any], Task] = {}
        self._waiting: dict[Address, deque[Message]] = {}
        self._told: dict[Address, int] = {}
        self._bell, self._ear = socket.socketpair()
        self._ear.setblocking(False)
        self._bell.setblocking(False)
        self._rung = False
        self._over = False
        self._thread = Thread(target=self._run, name=f"flockstep-mover-{rank}", daemon=True)

    def start(self) -> None:
        """Begin to move messages."""
        self._thread.start()

    @property
    def here(self) -> bool:
        """Whether the caller is the pump's own thread."""
        return current_thread() is self._thread

    def ask(self, action: Callable[[], None]) -> None:
        """Have something done on the pump's thread, after all that was asked before; does not wait."""
        self._asked.append(action)
        if not self._rung:
            self._rung = True
            with contextlib.suppress(OSError):  # it is ringing already, or nobody listens any more
                self._bell.send(b"!")
        if self._over:
            self._do()

    def start_call(self, program: Callable[[Party], Awaitable[T]], channel: str = "", what: str = "") -> Future[T]:
        """Start a program; one in a channel is part of what all ranks do there, and `what` is what they agree on."""
        future: Future[T] = Future()

        def begin() -> None:
            if self.failure is not None:
                future.set_exception(self.failure)
                return
            objection = self.party.objection(channel, what) if channel else None
            part = program(self.party) if objection is None else _raising(objection)
            run = _ending_in(future, part, lambda error: self.party.call_off(channel, error))
            task = self.party.background(channel, run)
            if channel:
                self.party.begun(channel, task)
            if not task.done:
                self._open[future] = task
                future.add_done_callback(self._ended)

        self.ask(begin)
        return future

    def wait(self, future: Future[T], timeout: float | None, what: str) -> T:
        """What a program returns.

        Raises:
            TimedOut: it has not ended within `timeout` seconds, and was given up.
        """
        if self.here:
            raise ConfigurationError(f"{what} would wait for itself on the mover's own thread; call it on another")
        try:
            return future.result(timeout)
        except TimeoutError:
            if future.done():
                return future.result()  # its own error, or it has ended just now
        error = TimedOut(f"worker {self.party.rank} waited {timeout:g} s for {what}; the others may be late or stopped")
        self.ask(lambda: self._give_up(future, error))
        return future.result()

    def send(self, to: Address, message: Message) -> None:
        """Send to a peer; what goes to one that is gone goes nowhere. Other ways for large arrays would begin here."""
        if to in self.party.departed or self._member is None or self.failure is not None:
            return
        if to in self._waiting:
            self._waiting[to].append(message)
            return
        try:
            self._member.bus.send(to, message)
        except (Backlog, PeerLost):  # slow, or not connected at the moment: whether it is lost is for the supervisor
            self._waiting[to] = deque([message])

    def collect(self) -> None:
        """The thread does it all the time."""

    def updates(self, source: Address | None, count: int, staleness: int | None, weight: float | None = None) -> None:
        """A mover has no strategy whose record this would belong to."""

    def figure(self, name: str, value: float) -> None:
        """A mover has no strategy whose record this would belong to."""

    def stop(self) -> None:
        """End the thread."""
        error = ConfigurationError("this mover is closed; use it before close(), or inside its with block")

        def last() -> None:
            for rank in self.party.others:
                self.party.send(rank, BYE)
            self._end(error)

        self.ask(last)
        if not self.here:
            self._thread.join()
            self._bell.close()
            self._ear.close()

    def _run(self) -> None:
        try:
            while self.failure is None:
                self._listen()
                self._do()
                self._retry()
                if self.failure is None:
                    self._wait()
        except FlockstepError as error:
            self._end(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may wait for this thread for ever
            failure = RunError(f"the mover of worker {self.party.rank} failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._end(failure)
        self._over = True
        self._do()  # calls that came too late hear of it

    def _listen(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._ear.recv(64)
        self._rung = False
        for _ in range(AT_ONCE):
            message = self._member.receive(0) if self._member is not None else None
            if message is None:
                return
            self._take(message)
        self.ask(lambda: None)  # there may be more

    def _wait(self) -> None:
        """Until a message is here, or somebody asks for something."""
        if self._member is None:
            select.select([self._ear], [], [])
        else:
            message = self._member.receive(RETRY if self._waiting else LOOK, self._ear.fileno())
            if message is not None:
                self._take(message)

    def _take(self, message: Message) -> None:
        if message.source == LAUNCHER:
            self._obey(message)
        else:
            self.party.deliver(message)

    def _do(self) -> None:
        with contextlib.suppress(IndexError):  # after the end, several threads may look here
            for _ in range(len(self._asked)):
                action = self._asked.popleft()
                action()

    def _retry(self) -> None:
        """Send what waited; take a rank for lost whose connection broke though the supervisor knows of no death."""
        if self._member is not None:
            for peer in self._member.bus.broken(2 * self._member.ticket.heartbeat) - self.party.departed:
                self.party.reasons[peer] = f"the connection to worker {peer} broke"
                self._waiting.pop(peer, None)
                self.party.lose(peer)
                self.flow.look()
        for to in list(self._waiting):
            queue = self._waiting.pop(to)
            while queue and to not in self._waiting:
                self.send(to, queue.popleft())
            if queue:
                self._waiting[to].extend(queue)

    def _obey(self, message: Message) -> None:
        if message.tag == "stop":
            raise stopped(message)
        if message.tag == "lost":
            address = int(message.note["address"])
            assert self._member is not None
            self._member.bus.disconnect(address)
            self.party.reasons[address] = str(message.note["reason"])
            self.party.lose(address)
            self.flow.look()

    def _hears(self, message: Message) -> bool:
        if message.tag == ARRIVED:
            self.flow.give(message.source, int(message.note.get("bytes", 0)))
            return True
        if message.note.get("counted") and message.source != self.party.rank:
            told = self._told[message.source] = self._told.get(message.source, 0) + message.payload_bytes
            if told >= TOLD_EVERY:
                self._told[message.source] = 0
                self.party.send(message.source, ARRIVED, None, {"bytes": told})
        done = self._hear(message)
        if message.tag == BYE:
            self.flow.look()
        return done

    def _ended(self, future: Future[Any]) -> None:
        self._open.pop(future, None)

    def _give_up(self, future: Future[Any], error: FlockstepError) -> None:
        task = self._open.get(future)
        if task is not None:
            self.party.give_up(task, error)

    def _end(self, error: FlockstepError) -> None:
        """Nothing goes on after this; every call that is under way ends with `error`."""
        if self.failure is None:
            self.failure = error
        self.flow.end(self.failure)
        for task in list(self._open.values()):
            self.party.give_up(task, self.failure)


async def _raising(error: FlockstepError) -> Any:
    raise error


async def _ending_in(future: Future[T], program: Awaitable[T], failed: Callable[[Exception], None]) -> None:
    """Run a program to its end, and put what comes of it into the future: nothing is raised on the pump's thread."""
    try:
        result = await program
    except Exception as error:  # noqa: BLE001 - it is for the thread that called
        failed(error)
        future.set_exception(error)
    else:
        future.set_result(result)
