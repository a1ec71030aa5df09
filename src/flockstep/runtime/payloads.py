"""Sends arrays of any length between workers. A message holds at most about as many bytes as the model has, so a longer
array travels in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flockstep.arrays.namespace import to_host
from flockstep.arrays.schema import FlatArray
from flockstep.links.wire import MAX_CODING
from flockstep.nodes import Worker


def send_pieces(me: Worker, to: Sequence[int], tag: str, data: FlatArray) -> None:
    """Send bytes (uint8) to other workers, each of which calls `receive_pieces` with the same tag."""
    me.send_all(to, tag, None, {"bytes": data.nbytes})
    piece = me.params.nbytes + MAX_CODING
    for start in range(0, len(data), piece):
        me.send_all(to, tag, data[start : start + piece])


async def receive_pieces(me: Worker, source: int, tag: str) -> FlatArray:
    """Return the bytes (uint8) that the worker `source` has sent.

    Raises:
        PeerLost: the worker was lost before all pieces arrived.
    """
    data = np.empty(int((await me.receive(tag, source)).note["bytes"]), np.uint8)
    start = 0
    while start < len(data):
        part = to_host((await me.receive(tag, source)).payload)
        data[start : start + len(part)] = part
        start += len(part)
    return data
