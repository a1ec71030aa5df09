"""Requests between ranks, and the threads that answer them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any

from flockstep.messages import Array, Message

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
        self._queue: SimpleQueue[Message | None] = SimpleQueue()
        self._answer = answer
        Thread(target=self._run, name=f"flockstep-serve-{name}", daemon=True).start()

    def take(self, message: Message) -> None:
        """Queue a request for the thread that runs the handler."""
        self._queue.put(message)

    def stop(self) -> None:
        """End the thread after it has answered all queued requests."""
        self._queue.put(None)

    def _run(self) -> None:
        while (message := self._queue.get()) is not None:
            self._answer(message)
