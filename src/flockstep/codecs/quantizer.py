"""The base of codecs that send every element in a few bits."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from flockstep import registry
from flockstep.arrays import kernels
from flockstep.arrays.namespace import cast, copied
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.codecs.low_rank import not_finite
from flockstep.errors import ProtocolError

LARGEST = {"float16": 65504.0, "bfloat16": 2.0**128 - 2.0**120}
"""Name of a dtype that is computed in float32 → the dtype's largest finite number."""


def scale_dtype(dtype: str) -> str:
    """Return the dtype of the scales of an array of `dtype`, in which the codec also computes."""
    return "float64" if dtype == "float64" else "float32"


def computed_in(array: Any) -> bool:
    """Return whether kernels can work directly on an array: contiguous, and of dtype float32 or float64."""
    contiguous = not isinstance(array, np.ndarray) or array.flags.c_contiguous
    return contiguous and kernels.name_of(array) in ("float32", "float64")


class Quantizer(Codec):
    """Encodes every element in a few bits; if the encoding takes no fewer bytes than the array, the array is sent
    unchanged.

    A NaN or an infinity raises `Diverged`, except in an array sent unchanged. A decoded value beyond the range of the
    array's dtype becomes the dtype's largest number.
    """

    @abstractmethod
    def coded_bytes(self, size: int, dtype: str) -> int:
        """Return the number of bytes of the encoding of `size` elements."""

    @abstractmethod
    def coded(self, floats: FlatArray, random: np.random.Generator) -> Bytes:
        """Return the encoding of a flat array of float32 or float64.

        Raises:
            Diverged: an element is infinite or not a number.
        """

    @abstractmethod
    def uncoded(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        """Return the array of float32 or float64 that `data` encodes; `data` has the length of an encoding."""

    def add_uncoded(self, data: Bytes, out: FlatArray, scale: float) -> None:
        """Add `scale` times the decoded values to `out`, for contiguous arrays of float32 and float64."""
        decoded: Any = self.uncoded(data, len(out), kernels.name_of(out))
        out += decoded * scale

    def as_it_is(self, size: int, dtype: str) -> bool:
        """Return whether an array of this size and dtype is sent unchanged, because its encoding would take no fewer
        bytes.
        """
        return self.coded_bytes(size, dtype) >= size * kernels.numpy_dtype(dtype).itemsize

    def wire_bytes(self, size: int, dtype: str) -> int:
        return min(self.coded_bytes(size, dtype), size * kernels.numpy_dtype(dtype).itemsize)

    def encode(self, array: FlatArray, random: np.random.Generator) -> Bytes:
        """Return the encoding, or the array's own bytes if the encoding would take no fewer bytes.

        Raises:
            Diverged: an encoded element is infinite or not a number.
        """
        k, flat = kernels.of(array), array.reshape(-1)
        if self.as_it_is(len(flat), kernels.name_of(flat)):
            whole: Bytes = k.as_bytes(copied(flat))
            return whole
        with np.errstate(over="ignore", invalid="ignore"):
            return self.coded(k.as_floats(flat), random)

    def decode(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        """Return the array that `data` encodes.

        Raises:
            ProtocolError: wrong length, impossible scales or codes.
        """
        self._check_length(data, size, dtype)
        k = kernels.of(data)
        if self.as_it_is(size, dtype):
            whole: FlatArray = k.from_bytes(data, dtype)
            return whole
        array = self.uncoded(data, size, scale_dtype(dtype))
        if dtype in LARGEST:
            array = k.saturated(array, LARGEST[dtype])
        return cast(array, dtype, copy=False)

    def add_decoded(self, data: Bytes, out: FlatArray, scale: float = 1.0) -> None:
        """Add scale * decode(data) to `out`, directly from the encoding; data that is refused may leave `out` partly
        changed.

        Raises:
            ProtocolError: `decode` would refuse `data`.
        """
        dtype = kernels.name_of(out)
        if not computed_in(out) or self.as_it_is(len(out), dtype):
            super().add_decoded(data, out, scale)
            return
        self._check_length(data, len(out), dtype)
        self.add_uncoded(data, out, scale)

    def refuse(self, floats: FlatArray, found: bool) -> None:
        """Raise an error that names the first element that is not finite, if `found` is true.

        Raises:
            Diverged: `found` is true.
        """
        if found:
            raise not_finite(registry.name_of(type(self)), floats, slice(0, len(floats)))

    def require(self, sound: bool, size: int, dtype: str) -> None:
        """Check that the received scales and codes of an array of `size` elements are possible; `sound` is the result
        of the check.

        Raises:
            ProtocolError: `sound` is false.
        """
        if not sound:
            name = registry.name_of(type(self))
            raise ProtocolError(f"{name} got impossible scales or codes for {size} elements of {dtype}")

    def _check_length(self, data: Bytes, size: int, dtype: str) -> None:
        wanted = self.wire_bytes(size, dtype)
        if len(data) != wanted:
            name = registry.name_of(type(self))
            raise ProtocolError(f"{name} needs {wanted} bytes for {size} elements of {dtype}, got {len(data)}")
