"""Detects which nodes of a run are lost, and how each node was lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from flockstep.launchers.children import Child, how_it_ended
from flockstep.launchers.link import ProcessLink
from flockstep.launchers.out_of_memory import OutOfMemoryDetector
from flockstep.messages import Address, node_name

SETTLING = 0.5
"""Seconds to wait, after a process has exited or its connection has closed, for the other of these two events, because
the last messages of the process may still arrive.
"""


class Health:
    """Reports lost nodes after all their messages have arrived.

    A node's link breaks if the node is stopped for longer than the heartbeat timeout, or if the node closes its end. If
    this host started the process, the exit code also shows that, and how, the process ended.
    """

    def __init__(
        self,
        children: Mapping[Address, Child],
        links: Mapping[Address, ProcessLink],
        heartbeat: float,
        memory: OutOfMemoryDetector | None = None,
        now: Callable[[], float] = time.monotonic,
        hint: str = "",
    ):
        """`hint` is a clause for the case that a script ends without joining the run."""
        self._children = children
        self._links = links
        self._heartbeat = heartbeat
        self._memory = memory or OutOfMemoryDetector()
        self._now = now
        self._hint = hint
        self._broken: set[Address] = set()
        self._since: dict[Address, float] = {}

    def ended(self, address: Address) -> bool:
        """Return whether a node is known to have ended."""
        child, link = self._children.get(address), self._links.get(address)
        if child is not None:
            return child.exit_code() is not None
        return link is None or self._is_broken(address, link)

    def left(self, address: Address) -> bool:
        """Return whether a node has closed its link or has ended."""
        link = self._links.get(address)
        return link is None or self._is_broken(address, link) or self.ended(address)

    def gone(self, address: Address) -> str | None:
        """Return text that says how a node was lost; None if the node is alive, or if its last messages may still
        arrive.
        """
        child, link = self._children.get(address), self._links.get(address)
        code = None if child is None else child.exit_code()
        broken = link is not None and self._is_broken(address, link)
        if code is None and not broken:
            return None
        since = self._since.setdefault(address, self._now())
        if (code is None or not broken) and self._now() - since < SETTLING:
            return None
        if code is None:
            ended = "" if child is not None else "has ended, or "
            return f"{node_name(address)} {ended}has not answered for {self._heartbeat:g} s"
        other = None if child is None else child.reason
        how = f"{node_name(address)} {how_it_ended(code)}{self._memory.explain(code) if other is None else other}"
        return (
            f"{how} without joining the run (a script joins it by calling flockstep.distribute or flockstep.join)"
            f"{self._hint}"
            if code == 0 and link is None
            else how
        )

    def dying(self, addresses: Iterable[Address]) -> bool:
        """Return whether a node among `addresses` has ended or cannot be reached, and `gone` waits for its last
        messages.
        """
        return any(address in self._since for address in addresses)

    def _is_broken(self, address: Address, link: ProcessLink) -> bool:
        if link.disconnected():
            self._broken.add(address)
        return address in self._broken
