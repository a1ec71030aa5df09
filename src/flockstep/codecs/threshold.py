"""Threshold: sends every element whose magnitude exceeds a bound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flockstep.arrays import kernels
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.codecs.identity import Identity
from flockstep.codecs.sparse import Sparsifier
from flockstep.codecs.streamed import Indices, plain_bytes
from flockstep.errors import ConfigurationError, ProtocolError

COUNT_BYTES = 4


class Counted(Sparsifier):
    """Base of codecs whose number of sent elements depends on the data. An encoding holds this number (uint32), the
    indices (uint32) and the values.
    """

    exact_size = False
    """False, because the size of an encoding depends on the data."""

    def count(self, size: int) -> int:
        return size

    def head_bytes(self, size: int) -> int:
        return COUNT_BYTES + 4 * size

    def beyond(self, array: FlatArray, low: float) -> tuple[Bytes, Indices | None]:
        """Select the elements with |x| ≥ low, or the largest element if there is none; return the first part of the
        encoding, the number and the indices of the chosen elements, and the indices. These are None if so many elements
        are chosen that the array itself takes no more bytes.
        """
        k, size, dtype = kernels.of(array), len(array), kernels.name_of(array)
        room = size
        if self.values.lossless and self.values.exact_size:  # at least the bytes of the elements
            plain = plain_bytes(size, dtype)
            room = max(0, plain - COUNT_BYTES - 1) // (4 + plain_bytes(1, dtype))
        indices, complete = k.above(array, low, room)
        if not complete:
            return k.as_bytes(array[:0]), None
        if not len(indices) and size:
            indices = k.largest(array, 1)
        return k.join(k.number_bytes(array, len(indices), COUNT_BYTES), k.index_bytes(indices)), indices

    def locate(self, data: Bytes, size: int) -> tuple[Indices, int]:
        """Return the indices in `data`, and the number of bytes that precede the values.

        Raises:
            ProtocolError: too few bytes; indices that do not ascend, or exceed the array.
        """
        k = kernels.of(data)
        count = int.from_bytes(bytes(data[:COUNT_BYTES].tolist()), "little")
        head = COUNT_BYTES + 4 * count
        if len(data) < COUNT_BYTES or count > size or len(data) < head:
            raise ProtocolError(
                f"{self} got {len(data)} bytes that announce {count} of {size} elements, which is impossible"
            )
        indices = k.indices_from(data[COUNT_BYTES:head])
        if not k.ascending(indices, size):
            raise ProtocolError(f"{self} got indices that are not in ascending order or not below {size}")
        return indices, head


@dataclass(frozen=True)
class Threshold(Counted):
    """Sends every element with |x| above the fixed threshold `t`, or the largest element if there is none.

    Strom (2015) sends the elements beyond a fixed threshold as ±t; here their values are sent, as in Aji & Heafield
    (2017). Neither paper sends the largest element; because it is sent, the codec contracts every array, with a delta
    of at least 1/d.
    """

    t: float = 0.001
    values: Codec = Identity()

    def __post_init__(self) -> None:
        if not 0 <= self.t < float("inf"):
            raise ConfigurationError(
                f"threshold needs a finite t >= 0, got {self.t}; 0.001 sends every element whose magnitude is above "
                "0.001"
            )

    def choose(self, array: FlatArray, random: np.random.Generator) -> tuple[Bytes, Indices | None]:
        """Select the elements with |x| > t, or the largest element if there is none."""
        return self.beyond(array, kernels.of(array).just_above(array, self.t))

    def left_out(self, array: FlatArray) -> float:
        """Return the squared norm of the elements that are not sent, those with |x| ≤ t."""
        x = np.abs(array.astype(np.float64))
        return float(np.sum(np.square(np.where(x > self.t, 0, x))))
