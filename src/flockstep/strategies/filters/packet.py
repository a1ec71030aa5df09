"""The wire format of a filtered update: the keys, then the values of the entries."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flockstep.arrays.kernels import name_of
from flockstep.arrays.namespace import cast, namespace, to_device_of, to_host, zeros
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.errors import CompositionError, ProtocolError
from flockstep.strategies.filters.base import Filter

Keys = npt.NDArray[np.uint32]
Lists = dict[bytes, Keys]
"""Hash → list of keys, in order of use; the most recently used list is last."""

LISTED, HASHED = range(1, 3)
"""Values of the first byte of a packet. LISTED: the number of keys (4 bytes) and the keys (4 bytes each) follow.
HASHED: the hash of the key list follows.

If keys and values would take no fewer bytes than the whole update, the whole update is sent instead, encoded by the
codec; the receiver recognizes it by its size. So no packet is larger than the update without filters, for which
receivers are prepared.
"""
HASH_BYTES = 8
FAR = 1 << 60
"""A step number larger than that of any step of a run."""


@dataclass
class Outbox:
    """The sender's state for the filtered updates to one receiver."""

    pending: FlatArray | None = None
    """The withheld part of earlier updates, of shape (K,); None if there is none."""
    lists: Lists = field(default_factory=dict)


@dataclass
class Inbox:
    """The receiver's state for the filtered updates of one sender."""

    lists: Lists = field(default_factory=dict)


def check_filters(filters: Sequence[Filter], codec: Codec) -> None:
    """Check that filters can be used with a codec: the receiver must be able to tell the number of encoded entries from
    a message's size.

    Raises:
        CompositionError: the size of the codec's encoding depends on more than the number of entries.
    """
    if filters and not (codec.exact_size and codec.wire_bytes(2, "float32") > codec.wire_bytes(1, "float32")):
        raise CompositionError(
            f"filters need a codec for which the number of bytes determines the number of elements, got {codec}; use "
            "identity or half"
        )
    if filters and codec.bind_step(0) != codec.bind_step(FAR):
        raise CompositionError(
            f"filters need a codec that stays the same in every step, got {codec}; leave out the warm-up of the "
            "codec, or the filters"
        )


def pack(
    filters: Sequence[Filter],
    codec: Codec,
    update: FlatArray,
    params: FlatArray,
    outbox: Outbox,
    random: np.random.Generator,
    flush: bool = False,
) -> Bytes:
    """Return the packet for `update` (K,) plus the pending entries; store in `outbox` the entries that the filters
    withhold.

    `flush` sends every entry. The codec's error in the values is lost. Without filters, the result is just the encoded
    update.
    """
    if not filters:
        return codec.encode(update, random)
    wanted = update if outbox.pending is None else outbox.pending + update
    xp = namespace(wanted)
    sent, kept = cast(xp.ones_like(wanted), "bool"), cast(xp.zeros_like(wanted), "bool")
    for chosen in () if flush else filters:
        mask = chosen.lets_through(wanted, params, random)
        if mask is not None:
            sent &= mask
            if chosen.carries:
                kept |= ~mask
            else:
                wanted = xp.where(mask, wanted, 0)  # dropped permanently
    outbox.pending = xp.where(kept, wanted, 0) if kept.any() else None
    keys, dtype = np.flatnonzero(to_host(sent)).astype(np.uint32), name_of(wanted)
    room = codec.wire_bytes(len(wanted), dtype) - codec.wire_bytes(len(keys), dtype)
    head = _write_keys(keys, room, outbox.lists, _remembered(filters))
    if head is None:
        return codec.encode(xp.where(sent, wanted, 0), random)
    packet: Bytes = xp.concatenate([to_device_of(head, wanted), codec.encode(wanted[sent], random)])
    return packet


def unpack(filters: Sequence[Filter], codec: Codec, data: Bytes, size: int, dtype: str, inbox: Inbox) -> FlatArray:
    """Return the update (size,) that `data` contains, with zeros for the entries that were not sent.

    Raises:
        ProtocolError: `data` cannot be a packet for `size` elements, or refers to a key list that was never sent.
    """
    if not filters:
        return codec.decode(data, size, dtype)
    if len(data) >= codec.wire_bytes(size, dtype):
        return codec.decode(data, size, dtype)
    keys, start = _read_keys(data, size, inbox.lists, _remembered(filters))
    update: FlatArray = zeros(data, size, dtype=dtype)
    update[to_device_of(keys.astype(np.int64), data)] = codec.decode(data[start:], len(keys), dtype)
    return update


def _write_keys(keys: Keys, room: int, lists: Lists, remembered: int) -> Bytes | None:
    """Return the encoded keys, or None if they take `room` bytes or more."""
    plain = keys.astype("<u4").tobytes()
    digest = _digest(plain) if remembered else b""
    known = len(keys) > 0 and np.array_equal(lists.get(digest, ()), keys)
    if (1 + HASH_BYTES if known else 5 + len(plain)) >= room:
        return None
    if remembered:
        _remember(lists, digest, keys, remembered)
    if known:
        return np.frombuffer(bytes([HASHED]) + digest, np.uint8)
    return np.frombuffer(bytes([LISTED]) + len(keys).to_bytes(4, "little") + plain, np.uint8)


def _read_keys(data: Bytes, size: int, lists: Lists, remembered: int) -> tuple[Keys, int]:
    """Return the keys, and the position in `data` where the values begin."""
    kind = int(data[0]) if len(data) else -1
    if kind == HASHED and len(data) > HASH_BYTES:
        digest = _plain(data[1 : 1 + HASH_BYTES])
        if digest not in lists:
            raise ProtocolError(f"a push refers to the list of keys {digest.hex()}, which was never sent")
        _remember(lists, digest, lists[digest], remembered)
        return lists[digest], 1 + HASH_BYTES
    if kind != LISTED or len(data) < 5:
        raise ProtocolError(f"a push of {len(data)} bytes does not say which of {size} elements it contains")
    stop = 5 + 4 * int.from_bytes(_plain(data[1:5]), "little")
    if len(data) < stop:
        raise ProtocolError(f"a push of {len(data)} bytes is shorter than its list of keys")
    keys = np.frombuffer(_plain(data[5:stop]), "<u4").astype(np.uint32)
    if keys.size and (keys[-1] >= size or (keys[:-1] >= keys[1:]).any()):
        raise ProtocolError(f"the keys of a push must be in ascending order below {size}, got {keys[:8].tolist()}…")
    if remembered:
        _remember(lists, _digest(_plain(data[5:stop])), keys, remembered)
    return keys, stop


def _plain(data: Bytes) -> bytes:
    return to_host(data).tobytes()


def _remembered(filters: Sequence[Filter]) -> int:
    return max((each.lists for each in filters), default=0)


def _digest(plain: bytes) -> bytes:
    return hashlib.blake2b(plain, digest_size=HASH_BYTES).digest()


def _remember(lists: Lists, digest: bytes, keys: Keys, limit: int) -> None:
    """Make a key list the most recently used, and forget the least recently used; both ends do so in the same order."""
    lists.pop(digest, None)
    lists[digest] = keys
    if len(lists) > limit:
        del lists[next(iter(lists))]
