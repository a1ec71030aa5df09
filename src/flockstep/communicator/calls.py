"""What the calls of a communicator are made of: how a thread has the engine do something, and waits for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from threading import Lock
from typing import Any, TypeVar

import numpy as np

from flockstep.codecs.base import Codec
from flockstep.communicator.encoded import Encoded, Packet, checked, codec_of, packed
from flockstep.communicator.engine import ProgressEngine
from flockstep.communicator.rank import Rank
from flockstep.errors import ConfigurationError, PeerLost, RunError
from flockstep.messages import Array, Message

T = TypeVar("T")
E = TypeVar("E", bound=Encoded)
LONGEST_NAME = 200
"""Characters of a name."""


class Calls:
    """What all calls of a communicator have in common."""

    rank: int
    """This process's number, from 0."""
    workers: int
    """How many there are."""
    max_bytes: int
    """The size in bytes of the largest array that travels."""

    def __init__(self, engine: ProgressEngine, max_bytes: int):
        self.rank, self.workers, self.max_bytes = engine.node.rank, engine.node.workers, max_bytes
        self._engine = engine
        self._lock = Lock()
        self._uses: Counter[str] = Counter()
        self._memories: dict[str, Any] = {}
        self._holders: dict[str, Callable[[], bool]] = {}
        """Tag of a window → whether the calling thread holds that window."""
        self._sums: dict[int, Callable[[int, float | None], None]] = {}
        """Id of a shared array → what replaces it by the sum, divided, within a timeout."""

    def check_rank(self, rank: int) -> None:
        """Raise `ConfigurationError` unless there is such a rank."""
        if not 0 <= rank < self.workers:
            raise ConfigurationError(f"a rank must be one of 0..{self.workers - 1}, got {rank!r}")

    def packet(self, array: Any, codec: str | Codec | None, use: str = "") -> Packet:
        """A copy of the array as it is now, encoded if asked; `use` is what the codec's steps are counted under."""
        given, chosen = checked(array, self.max_bytes), codec_of(codec)
        return packed(given, chosen, 0 if chosen is None else self._count(use), self._random)

    def packet_or_nothing(
        self, array: Any, codec: str | Codec | None, kind: type[E], use: str = ""
    ) -> tuple[Array | None, E]:
        """The same as an array and a note of that kind, or no array."""
        if array is None:
            return None, kind()
        packet = self.packet(array, codec, use)
        return packet.data, packet.note.within(kind)

    def post(self, to: int, tag: str, array: Array, note: Encoded, closing: bool = False) -> None:
        """Send a message; `closing` says that a rank which only answers still takes it.

        Raises:
            PeerLost: the rank has left, or is dead.
        """
        self.require_open()
        node = self._engine.node
        if to in node.departed or (to in node.leaving and not closing):
            raise PeerLost(f"{node.end_of(to)}; worker {self.rank} has something for it")
        self._engine.post(to, array.nbytes, lambda: node.send(to, tag, array, note))

    def asked(self, to: int, tag: str, array: Array | None, note: Encoded, timeout: float | None, what: str) -> Message:
        """Send a request and wait for the reply.

        Raises:
            RunError: the one who was asked says what went wrong.
        """
        message = self.run(lambda me: me.ask(to, tag, array, note), timeout, what)
        if message.note.error:
            raise RunError(message.note.error)
        return message

    def run(self, program: Callable[[Rank], Awaitable[T]], timeout: float | None, what: str) -> T:
        """Run a program on the engine's thread, and wait for its end."""
        self.require_open()
        return self._engine.wait(self._engine.start(program), timeout, what)

    def together(self, name: str, what: str, program: Callable[[Rank], Awaitable[T]], timeout: float | None) -> T:
        """The same for a program in which every rank takes part; those of one name are told apart by their order."""
        self.require_open()
        with self._lock:
            self._uses[f"call {name}"] += 1
            channel = f"{named(name)}#{self._uses[f'call {name}']}"
            future = self._engine.start(program, channel, what)
        return self._engine.wait(future, timeout, what)

    def gone(self) -> set[int]:
        """The ranks that will give nothing more: they have left, are about to, or are dead."""
        return {rank for rank in range(self.workers) if self._engine.node.gone(rank)}

    def require_here(self, rank: int) -> None:
        """Raise `PeerLost` if that rank is dead, or has closed its communicator and so have all others."""
        if rank in self._engine.node.departed:
            raise PeerLost(f"{self.end_of(rank)}; worker {self.rank} wants to reach its window")

    def end_of(self, rank: int) -> str:
        """How a rank that is gone went."""
        return self._engine.node.end_of(rank)

    def book(self, sent: int, received: int, messages: int) -> None:
        """Put on the record what took the place of so many bytes in so many messages each way."""
        self._engine.ask(lambda: self._engine.runner.account.traffic.moved(sent, received, messages))

    def forget(self, tag: str) -> None:
        """The name of the window with that tag is free again."""
        self._engine.node.forget(tag)
        with self._lock:
            self._holders.pop(tag, None)

    def require_open(self) -> None:
        """Raise what has ended this communicator, or as `require_free`."""
        if self._engine.failure is not None:
            raise self._engine.failure
        self.require_free()

    def require_free(self) -> None:
        """Raise `ConfigurationError` if the calling thread holds a window, for which all that it calls would wait."""
        if any(held() for held in list(self._holders.values())):
            raise ConfigurationError(
                "a window's local() is held here, for which others wait; leave its with block first"
            )

    def _count(self, use: str) -> int:
        with self._lock:
            self._uses[use] += 1
            return self._uses[use] - 1

    def _random(self) -> np.random.Generator:
        with self._lock:
            return np.random.default_rng(self._engine.node.seeds.spawn(1)[0])


def named(name: str) -> str:
    """The name itself.

    Raises:
        ConfigurationError: it is too long.
    """
    if len(name) > LONGEST_NAME:
        raise ConfigurationError(f"a name has at most {LONGEST_NAME} characters, got {len(name)}; use a shorter one")
    return name
