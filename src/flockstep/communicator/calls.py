"""The base of a communicator's methods: submits a thread's work to the engine, and waits for the result."""

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
LONGEST_NAME = 200
"""Maximum number of characters of a name."""


class Calls:
    """Base class that all methods of a communicator build on."""

    rank: int
    """Rank of this process among the ranks of the run, from 0."""
    workers: int
    """Number of ranks in the run."""
    max_bytes: int
    """Size in bytes of the largest array that may be sent."""

    def __init__(self, engine: ProgressEngine, max_bytes: int):
        self.rank, self.workers, self.max_bytes = engine.node.rank, engine.node.workers, max_bytes
        self._engine = engine
        self._lock = Lock()
        self._uses: Counter[str] = Counter()
        self._memories: dict[str, Any] = {}
        self._holders: dict[str, Callable[[], bool]] = {}
        """Tag of a window → function that says whether the calling thread holds that window."""
        self._sums: dict[int, Callable[[int, float | None], None]] = {}
        """Id of a shared array → function that replaces it with the sum, divided by a number, within a timeout."""

    def check_rank(self, rank: int) -> None:
        """Check that a rank with this number exists.

        Raises:
            ConfigurationError: there is no such rank.
        """
        if not 0 <= rank < self.workers:
            raise ConfigurationError(f"a rank must be from 0 to {self.workers - 1}, got {rank!r}")

    def packet(self, array: Any, codec: str | Codec | None, use: str = "") -> Packet:
        """Return a copy of the array as it is now, encoded if a codec is given.

        Args:
            array: the array to send.
            codec: the codec, or None.
            use: the name under which the codec's steps are counted.
        """
        given, chosen = checked(array, self.max_bytes), codec_of(codec)
        return packed(given, chosen, 0 if chosen is None else self._count(use), self._random)

    def post(self, to: int, tag: str, array: Array, note: Encoded, closing: bool = False) -> None:
        """Send a message to the rank `to`.

        Args:
            to: the receiver's rank.
            tag: the message's tag.
            array: the flat array to send.
            note: the note that describes the array.
            closing: whether a rank that is closing, and only answers, still accepts the message.

        Raises:
            PeerLost: the rank has left or died.
        """
        self.require_open()
        node = self._engine.node
        if to in node.departed or (to in node.leaving and not closing):
            raise PeerLost(f"{node.end_of(to)}, so worker {self.rank} cannot send worker {to} a message")
        self._engine.post(to, array.nbytes, lambda: node.send(to, tag, array, note))

    def asked(self, to: int, tag: str, array: Array | None, note: Encoded, timeout: float | None, what: str) -> Message:
        """Send a request, and return the reply.

        Raises:
            RunError: the rank that was asked answered with an error.
        """
        message = self.run(lambda me: me.ask(to, tag, array, note), timeout, what)
        if message.note.error:
            raise RunError(message.note.error)
        return message

    def run(self, program: Callable[[Rank], Awaitable[T]], timeout: float | None, what: str) -> T:
        """Run a call's program on the engine's thread, wait for its end, and return its result."""
        self.require_open()
        return self._engine.wait(self._engine.start(program), timeout, what)

    def run_collective(self, name: str, what: str, program: Callable[[Rank], Awaitable[T]], timeout: float | None) -> T:
        """Run a program on the engine's thread in which every rank takes part; calls of the same name are matched by
        their order.
        """
        self.require_open()
        with self._lock:
            self._uses[f"call {name}"] += 1
            channel = f"{named(name)}#{self._uses[f'call {name}']}"
            future = self._engine.start(program, channel, what)
        return self._engine.wait(future, timeout, what)

    @property
    def node(self) -> Rank:
        """The rank that the engine runs, for questions about other ranks."""
        return self._engine.node

    def book(self, sent: int, received: int, messages: int) -> None:
        """Count the traffic of an exchange through shared memory as if messages had carried the arrays."""
        self._engine.ask(lambda: self._engine.runner.metrics.traffic.moved(sent, received, messages))

    def forget(self, tag: str) -> None:
        """Free the name of a window, which is given by the window's tag."""
        self._engine.node.forget(tag)
        with self._lock:
            self._holders.pop(tag, None)

    def require_open(self) -> None:
        """Check that the communicator works and that this thread may call it.

        Raises:
            FlockstepError: the error that ended the communicator, or the error of `require_free`.
        """
        if self._engine.failure is not None:
            raise self._engine.failure
        self.require_free()

    def require_free(self) -> None:
        """Check that the calling thread holds no window.

        Raises:
            ConfigurationError: the thread holds one, so that any call would wait for the thread itself.
        """
        if any(held() for held in list(self._holders.values())):
            raise ConfigurationError(
                "other ranks may be waiting for the window that this rank holds with local(); leave the block "
                "`with window.local()` before this call"
            )

    def _count(self, use: str) -> int:
        with self._lock:
            self._uses[use] += 1
            return self._uses[use] - 1

    def _random(self) -> np.random.Generator:
        with self._lock:
            return np.random.default_rng(self._engine.node.seeds.spawn(1)[0])


def named(name: str) -> str:
    """Return `name` after checking that it is not too long.

    Raises:
        ConfigurationError: the name is too long.
    """
    if len(name) > LONGEST_NAME:
        raise ConfigurationError(f"a name has at most {LONGEST_NAME} characters, got {len(name)}; use a shorter one")
    return name
