"""Sends snapshots of a node's parameters: at ticks of progress, at intervals for runs that end early, and at the
end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np

from flockstep.arrays.kernels import name_of
from flockstep.arrays.namespace import to_host
from flockstep.arrays.schema import FlatArray
from flockstep.errors import FlockstepError
from flockstep.messages import Fields
from flockstep.nodes import Node, Worker
from flockstep.records.snapshots import LAST
from flockstep.runtime.member import Member
from flockstep.runtime.tracker import FINAL

NEWEST_FIRST = 1.0
"""Seconds until a node's first snapshot between evaluations; longer for large models (see `NEWEST_SHARE`)."""
USUAL_RATE = 1e9
"""Assumed bytes per second at which a snapshot is sent, until the first snapshot has been measured."""
NEWEST_PERIOD = 5.0
"""Seconds between two snapshots that are sent between evaluations; longer if sending is slow (see `NEWEST_SHARE`)."""
NEWEST_SHARE = 50
"""Minimum ratio of the time between two snapshots to the time that it takes to send a snapshot, so that a node spends
at most 2 % of its time on sending.
"""


class SnapshotSender:
    """Sends snapshots of a node's parameters to the supervisor, which evaluates them."""

    def __init__(self, member: Member, alike: bool = False):
        """`alike`: all replicas are equal, so that only the worker of the lowest rank sends the newest one."""
        self._alike = alike
        self.buffers: Callable[[], FlatArray] = lambda: np.empty(0)
        self._member = member
        self._due: float | None = None
        self._closed = False

    def send_snapshot(self, node: Node, tick: float, t: float, sent: int, params: FlatArray | None = None) -> None:
        """Send a snapshot of `params` (default: the node's current parameters) to the supervisor."""
        params = node.params if params is None else params
        buffers = self.buffers()
        self._closed = tick == FINAL
        note: Fields = {"tick": tick, "seconds": t, "step": node.run_step, "sent_bytes": sent}
        size: Fields = {"size": len(params), "dtype": name_of(params), "buffers": buffers.nbytes}
        self._member.send_in_parts({**note, **size}, [to_host(params), buffers])
        if self._closed:
            self._member.tell("done", None, {"step": node.run_step})

    def newest(self, node: Node, now: Callable[[], float], sent: int) -> None:
        """Send a snapshot if the previous one is old enough, so that a recent model exists if the run ends early."""
        if self._alike and isinstance(node, Worker) and node.rank != node.view.ranks[0]:
            return
        if self._due is None:
            self._due = max(NEWEST_FIRST, NEWEST_SHARE * node.params.nbytes / USUAL_RATE)
        if (began := now()) >= self._due:
            self.send_snapshot(node, LAST, began, sent)
            self._due = now() + max(NEWEST_PERIOD, NEWEST_SHARE * (now() - began))

    def salvage(self, node: Node, t: float, sent: int) -> None:
        """Send the current parameters of a failing run, if they are finite."""
        with contextlib.suppress(FlockstepError, RuntimeError, MemoryError):  # a GPU that has failed returns nothing
            if not self._closed and np.isfinite(to_host(node.params)).all():
                self.send_snapshot(node, LAST, t, sent)
