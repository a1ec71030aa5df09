"""Which processes of a run are gone, and how they went."""

from __future__ import annotations

import time
from collections.abc import Mapping

from flockstep.launchers.children import Child, how_it_ended
from flockstep.launchers.link import Link
from flockstep.launchers.want_of_memory import WantOfMemory
from flockstep.messages import Address, node_name

SETTLING = 0.5
"""Seconds between the two signs of a death, its exit and the end of its connection; the last words are in between."""


class Health:
    """Notices processes that exited or stopped answering, once everything that they said has arrived."""

    def __init__(
        self,
        children: Mapping[Address, Child],
        links: Mapping[Address, Link],
        heartbeat: float,
        memory: WantOfMemory | None = None,
    ):
        self._children = children
        self._links = links
        self._heartbeat = heartbeat
        self._memory = memory or WantOfMemory()
        self._broken: set[Address] = set()
        self._since: dict[Address, float] = {}

    def gone(self, address: Address) -> str | None:
        """How that process went; None while it is there, or may have said something that has not arrived."""
        code, link = self._children[address].exit_code(), self._links.get(address)
        if link is not None and link.disconnected():
            self._broken.add(address)
        if code is None and address not in self._broken:
            return None
        since = self._since.setdefault(address, time.monotonic())
        if (code is None or address not in self._broken) and time.monotonic() - since < SETTLING:
            return None
        if code is None:
            return f"{node_name(address)} has not answered for {self._heartbeat:g} s"
        how = f"{node_name(address)} {how_it_ended(code)}{self._memory.explain(code)}"
        return (
            f"{how} without joining the run (a script joins it by calling flockstep.distribute or flockstep.join)"
            if code == 0 and link is None
            else how
        )
