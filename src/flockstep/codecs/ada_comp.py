"""AdaComp: sends, from every bin of elements, those that the newest gradient brings close to the bin's largest
element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from flockstep.arrays import kernels
from flockstep.arrays.namespace import cast, copied, first_not_finite, namespace
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec, Shape
from flockstep.codecs.low_rank import factor_dtype
from flockstep.codecs.parts import Parts
from flockstep.codecs.streamed import Indices, Streamed, plain_bytes, refuse
from flockstep.errors import ProtocolError, require

CAP = 1.5
"""Maximum ratio of the value sent for each element to the mean magnitude of the elements that the value replaces.

Up to a ratio of 2 the decoded array is closer to the original than zeros are; beyond 2 it is not.
"""


@dataclass(frozen=True)
class AdaComp(Streamed):
    """AdaComp (Chen et al. 2017, algorithm 2): sends, from every bin, the elements that the newest gradient brings
    close to the bin's largest element.

    With G = R + dW and H = G + dW, it sends from every bin the elements j with |H_j| ≥ max |G|, as sign(G_j) times the
    mean of all bins' max |G|, and keeps R = G minus what was sent. R is the error kept and dW the array given to
    `encode_residual`; without an error R = 0. Tensors are encoded separately. `bin` is the number of elements of a bin;
    the paper uses 50 for convolutions and 500 for other layers. Two additions to the paper make every encoding a
    contraction: if no |H_j| of a bin reaches max |G|, the largest element is sent, and the mean is capped at 1.5 times
    the mean of the |G_j| sent, which matters only if bins differ by orders of magnitude.

    The encoding holds the common value (float32; float64 for float64 arrays), the number of elements sent from each
    bin, then each element's place in its bin and its sign, in the fewest whole bits. If this encoding is not smaller
    than the array, the array itself is sent.
    """

    bin: int = 50

    def __post_init__(self) -> None:
        require(1 <= self.bin <= 1 << 16, "bin of adacomp", "1 to 65536 elements", self.bin, "50 is usual")

    contraction = True
    """The codec is a contraction with delta of at least 1/(2d²) for d elements."""

    exact_size = False
    """False, because the size of an encoding depends on the data."""

    def wire_bytes(self, size: int, dtype: str) -> int:
        return plain_bytes(size, dtype)

    def encode(self, array: FlatArray, random: np.random.Generator) -> Bytes:
        """Encode the array without an error from earlier steps (R = 0)."""
        flat = array.reshape(-1)
        return self._sent(flat, flat)[0]

    def encode_residual(self, array: FlatArray, error: FlatArray, random: np.random.Generator) -> Bytes:
        """Encode G = error + array; afterwards `error` holds R, the part of G that was not sent."""
        flat = array.reshape(-1)
        error += flat
        data, sent = self._sent(error, flat)
        if sent is None:
            error[:] = 0
        else:
            kernels.of(error).scatter_add(error, *self._elements(*sent, kernels.name_of(error)), -1.0)
        return data

    def read(self, data: Bytes, size: int, dtype: str) -> tuple[Indices, FlatArray]:
        """Return the ascending indices and the values of the elements that an encoding contains.

        Raises:
            ProtocolError: a bin has too many elements, places do not ascend, or lengths do not match.
        """
        k, start, bins, wide = kernels.of(data), self._head(size, dtype), -(-size // self.bin), factor_dtype(dtype)
        if not size or len(data) < start:
            raise ProtocolError(f"{self} needs at least {start} bytes for {size} elements of {dtype}, got {len(data)}")
        counts = k.unpacked_integers(data[wide.itemsize : start], bins, self.bin.bit_length())
        count, width = int(counts.sum()), 1 + (self.bin - 1).bit_length()
        if int(counts.max()) > self.bin or len(data) != start + -(-count * width // 8):
            raise ProtocolError(f"{self} got {len(data)} bytes, which do not match the announced {count} elements")
        codes = k.unpacked_integers(data[start:], count, width)
        scale = float(k.from_bytes(data[: wide.itemsize], wide.name)[0])
        if not isfinite(scale) or scale < 0:
            raise ProtocolError(f"{self} got an impossible scale {scale}")
        indices, values = self._elements(codes, counts, scale, dtype)
        if count and (int(codes.max()) >= 2 * self.bin or not k.ascending(indices, size)):
            raise ProtocolError(
                f"{self} got element positions that are not in ascending order or lie outside their bin"
            )
        return indices, values

    def error_bound(self, array: FlatArray) -> float:
        """Return ||x||² as an upper bound on the error: a decoded element is never further from the original than zero
        is.
        """
        return float(np.sum(np.square(array.astype(np.float64))))

    def bind_shapes(self, shapes: Sequence[Shape]) -> Codec:
        """Return the codec for an array of concatenated tensors: every tensor has its own bins and its own common
        value.
        """
        return Parts.of([self] * len(shapes), shapes) if len(shapes) != 1 else self

    def _head(self, size: int, dtype: str) -> int:
        return factor_dtype(dtype).itemsize + -(-(-(-size // self.bin) * self.bin.bit_length()) // 8)

    def _sent(self, total: FlatArray, change: FlatArray) -> tuple[Bytes, tuple[Indices, Any, float] | None]:
        """Return the encoding of `total`, and its codes, counts and scale; None if the array itself is sent."""
        k, dtype = kernels.of(total), kernels.name_of(total)
        plain = self.wire_bytes(len(total), dtype)
        if len(total) and self._head(len(total), dtype) < plain:
            codes, counts, scale = k.bins_reached(total, change, self.bin, CAP)
            if not isfinite(scale):
                place = first_not_finite(total)
                raise refuse(self, float(total[place]), place)
            head = k.packed_integers(counts, self.bin.bit_length())
            body = k.packed_integers(codes, 1 + (self.bin - 1).bit_length())
            data = k.join(k.as_bytes(k.full(total, 1, scale, factor_dtype(dtype).name)), head, body)
            if len(data) < plain:
                return data, (codes, counts, scale)
        return k.as_bytes(copied(total)), None

    def _elements(self, codes: Indices, counts: Any, scale: float, dtype: str) -> tuple[Indices, FlatArray]:
        """Return the indices and the values of the elements that were sent."""
        k = kernels.of(codes)
        value = k.full(codes, 1, scale, factor_dtype(dtype).name)
        values = cast(namespace(codes).where(codes & 1 > 0, -value, value), dtype, copy=False)
        return k.from_buckets(codes >> 1, self.bin, counts), values
