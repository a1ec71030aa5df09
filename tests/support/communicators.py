"""Several communicators in one process, joined by sockets as in a run: each rank is a thread of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from flockstep.communicator.communicator import Communicator
from flockstep.communicator.encoded import NOTES
from flockstep.communicator.rank import Rank
from flockstep.links.bus import LAUNCHER
from flockstep.links.control import Control, Line, framed
from flockstep.links.kinds import Tcp
from flockstep.links.wire import SenderIdentity
from flockstep.messages import AnyNote, Message
from flockstep.nodes import View
from flockstep.records.scratch import scratch
from flockstep.runtime.member import SAID, NodeLost

T = TypeVar("T")
PATIENCE = 30.0


class Sockets:
    """The part of a membership that a communicator needs."""

    def __init__(self, rank: int, most: int, control: Control):
        me = SenderIdentity("run", rank, "schema", most, notes=NOTES, secret=b"secret")
        self.line = Line(replace(me, notes=SAID, secret=b""), control.address, 5.0)
        self.line.introduce(b"hello")
        ((_, self.frames),) = control.heard()
        self.bus = Tcp().bus(me, Path(), "")

    def receive(self, seconds: float | None, also: int | None = None) -> Message | None:
        descriptors = (*self.line.descriptors, *(() if also is None else (also,)))
        return self.line.receive() or self.bus.poll(seconds, descriptors) or self.line.receive()

    def close(self, linger: float) -> None:
        self.bus.close(min(linger, 0.2))  # the lost ones never read what is still for them
        self.line.close()


class Group:
    """The communicators of all ranks."""

    def __init__(self, workers: int, most: int):
        self._stack = ExitStack()
        folder = self._stack.enter_context(scratch())
        self.control = Control(f"ipc://{folder / 'control'}", 5.0)
        self._stack.callback(self.control.close)
        self._said: dict[int, int] = {}
        self.sockets = [Sockets(rank, most, self.control) for rank in range(workers)]
        where = {rank: one.bus.address for rank, one in enumerate(self.sockets)}
        for rank, one in enumerate(self.sockets):
            one.bus.connect({peer: at for peer, at in where.items() if peer != rank})
        for rank, one in enumerate(self.sockets):
            while not all(one.bus.reachable(peer) for peer in where if peer != rank):
                for other in self.sockets:
                    assert other.receive(0.001) is None
        self.nodes = [Rank(rank, workers, 0) for rank in range(workers)]
        self.ranks = [
            Communicator(node, one, most, patience=10.0) for node, one in zip(self.nodes, self.sockets, strict=True)
        ]
        self._pool = ThreadPoolExecutor(4 * workers)

    def start(self, program: Callable[[Communicator], T], *ranks: int) -> list[Any]:
        """Run a program on some ranks (none: on all); the futures."""
        chosen = ranks or range(len(self.ranks))
        return [self._pool.submit(program, self.ranks[rank]) for rank in chosen]

    def run(self, program: Callable[[Communicator], T], *ranks: int) -> list[T]:
        """Call a function with every communicator; return the results in order of rank."""
        return [future.result(PATIENCE) for future in self.start(program, *ranks)]

    def say(self, to: int, tag: str, note: AnyNote) -> None:
        """Send a communicator the message that a supervisor would send."""
        self._said[to] = self._said.get(to, 0) + 1
        message = Message(LAUNCHER, tag, None, note, number=self._said[to])
        self.sockets[to].frames.send(framed(message, SenderIdentity("run", LAUNCHER, "schema", 1 << 20)))

    def lose(self, rank: int, reason: str) -> None:
        """Notify all other ranks that a rank is dead."""
        for other in range(len(self.ranks)):
            if other != rank:
                self.say(
                    other,
                    "lost",
                    NodeLost(rank, reason, View(1, tuple(r for r in range(len(self.ranks)) if r != rank))),
                )

    def close(self) -> None:
        """Close the communicators that are still open."""
        for future in self.start(lambda rank: rank.close(0.1)):
            future.exception(PATIENCE)
        self._pool.shutdown()
        for one in self.sockets:
            one.frames.close()
        self._stack.close()


@contextmanager
def communicators(workers: int, most: int = 1 << 24) -> Iterator[Group]:
    """Communicators of ranks 0..workers-1."""
    group = Group(workers, most)
    try:
        yield group
    finally:
        group.close()
