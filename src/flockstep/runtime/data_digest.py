"""Digests of the data that all workers should read identically; the supervisor compares the digests."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from flockstep.arrays.namespace import is_tensor, to_host
from flockstep.messages import Fields
from flockstep.runtime.session import newest_session

MOST = 1 << 16
"""Maximum number of bytes of each array that enter the digest; further bytes are ignored."""


def digest_of(batch: object) -> str:
    """Return 16 hexadecimal digits that are equal for batches with equal numbers and texts."""
    digest = hashlib.sha256()
    _add(digest, batch)
    return digest.hexdigest()[:16]


def _add(digest: Any, value: object) -> None:
    """Add numbers, texts, arrays and containers of them; of any other object only its type, which all workers share."""
    digest.update(type(value).__name__.encode())
    if isinstance(value, (bytes, bytearray)):
        digest.update(value)
    elif isinstance(value, (str, bool, int, float, complex)):
        digest.update(repr(value).encode())
    elif isinstance(value, Mapping):
        for key, one in value.items():
            _add(digest, key)
            _add(digest, one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            _add(digest, one)
    elif (is_tensor(value) and value.layout is sys.modules["torch"].strided) or (  # type: ignore[attr-defined]
        isinstance(value, np.ndarray) and not value.dtype.hasobject
    ):
        array = np.ascontiguousarray(to_host(value))
        digest.update(f"{array.shape} {array.dtype}".encode())
        digest.update(array.reshape(-1).view(np.uint8)[:MOST].data)


def tell_data(number: int, what: str, digest: str, certain: bool) -> None:
    """Send the supervisor a digest of the data that this worker is about to read; do nothing if there is no run.

    The supervisor compares digests of the same run step, of the loader with the same `number` among those in use, and
    of the same kind `what`. If they differ, the run ends if the difference is `certain` to be a mistake.
    """
    here = newest_session()
    if here is not None and here.worker is not None and not here.closed:
        note: Fields = {"of": f"{what} of loader {number}", "digest": digest, "certain": int(certain)}
        here.member.tell("data", None, {**note, "step": here.worker.run_step})
