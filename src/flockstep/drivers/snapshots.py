"""Hands in a node's parameters: at ticks of progress, now and then, and at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np

from flockstep.arrays.kernels import name_of
from flockstep.arrays.namespace import on_host
from flockstep.arrays.schema import FlatArray
from flockstep.drivers.member import Member
from flockstep.drivers.tracker import FINAL
from flockstep.errors import FlockstepError
from flockstep.messages import Fields
from flockstep.nodes import Node
from flockstep.records.handed_in import LAST

NEWEST_FIRST = 1.0
"""Seconds after which a node hands in its parameters for the first time whether or not an evaluation is due."""
NEWEST_PERIOD = 5.0
"""Seconds until the node does so again, unless sending is slow: see `NEWEST_SHARE`."""
NEWEST_SHARE = 50
"""A node waits at least this many times as long as sending its parameters took: they cost 2 % of its time at most."""


class Snapshots:
    """Hands in a node's parameters."""

    def __init__(self, member: Member):
        self.buffers: Callable[[], FlatArray] = lambda: np.empty(0)
        self._member = member
        self._due = NEWEST_FIRST
        self._closed = False

    def hand_in(self, node: Node, tick: float, t: float, sent: int) -> None:
        """Send the supervisor the node's parameters as they are now."""
        buffers = self.buffers()
        self._closed = tick == FINAL
        note: Fields = {"tick": tick, "t": t, "step": node.run_step, "sent": sent}
        size: Fields = {"size": len(node.params), "dtype": name_of(node.params), "buffers": buffers.nbytes}
        self._member.hand_over({**note, **size}, [on_host(node.params), buffers])
        if self._closed:
            self._member.tell("done", None, {"step": node.run_step})

    def newest(self, node: Node, now: Callable[[], float], sent: int) -> None:
        """Hand in the parameters once in a while, for a run that may not come to its end."""
        if (began := now()) >= self._due:
            self.hand_in(node, LAST, began, sent)
            self._due = now() + max(NEWEST_PERIOD, NEWEST_SHARE * (now() - began))

    def salvage(self, node: Node, t: float, sent: int) -> None:
        """The run fails: hand in the parameters as they are, if they are numbers."""
        with contextlib.suppress(FlockstepError, RuntimeError):  # a GPU that has failed gives nothing back
            if not self._closed and np.isfinite(on_host(node.params)).all():
                self.hand_in(node, LAST, t, sent)
