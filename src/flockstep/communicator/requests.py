"""Requests between ranks: what is asked, and the threads that answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any

from flockstep.messages import Array, Message

Handler = Callable[[int, Array | None], Any]
"""Answers a request, given the rank that asks and the array that it gives; returns an array or None."""


@dataclass(frozen=True, eq=False)
class Request:
    """What another rank asks: answer it with `reply`."""

    source: int
    name: str
    array: Array | None
    message: Message


class Server:
    """Answers the requests of one name, one after the other, on a thread of its own."""

    def __init__(self, name: str, answer: Callable[[Message], None]):
        """`answer` raises nothing."""
        self._queue: SimpleQueue[Message | None] = SimpleQueue()
        self._answer = answer
        Thread(target=self._run, name=f"flockstep-serve-{name}", daemon=True).start()

    def take(self, message: Message) -> None:
        """One more request."""
        self._queue.put(message)

    def stop(self) -> None:
        """End after what is here by now."""
        self._queue.put(None)

    def _run(self) -> None:
        while (message := self._queue.get()) is not None:
            self._answer(message)
