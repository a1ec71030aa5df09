"""Failpoints: named points of the code at which a test may end the process."""

from __future__ import annotations

from collections.abc import Callable

hooks: list[Callable[[str], None]] = []
"""Functions that a test adds; each is called with the name of every point that is reached.

Points that every message or step reaches call the hooks directly, to save the call of `reach`.
"""


def reach(point: str) -> None:
    """Call all hooks with the name of the point that the process has reached."""
    for hook in hooks:
        hook(point)
