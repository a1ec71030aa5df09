"""Callbacks with which long-running functions report their current task and their progress."""

from __future__ import annotations

from typing import Protocol


class ProgressCallback(Protocol):
    """Function that reports progress to the user."""

    def __call__(self, what: str, done: float = 0, total: float = 0) -> object:
        """`what`: the part that begins; `done`: parts that are finished; `total`: all parts, 0 if not known."""


def silent(what: str, done: float = 0, total: float = 0) -> None:
    """Ignore a progress report, for callers that show no progress."""
