"""The interface of a codec."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from flockstep.arrays.schema import FlatArray
from flockstep.expression import Component

Bytes = npt.NDArray[np.uint8]
Shape = tuple[int, ...]


class Codec(Component):
    """A reversible encoding of arrays as bytes. A codec states its guarantees as properties, which
    `flockstep.testing.codecs` checks.

    An array to encode may have any shape and memory layout and is treated as flat. Its elements are float16, bfloat16,
    float32 or float64. A codec written with the kernels of `flockstep.arrays.kernels` takes numpy arrays and torch
    tensors and returns bytes of the same kind.
    """

    noun: ClassVar[str] = "codec"

    @property
    def lossless(self) -> bool:
        """Whether decode(encode(x)) equals x in every bit."""
        return False

    @property
    def unbiased(self) -> bool:
        """Whether the mean of decode(encode(x)) over the codec's own randomness is x."""
        return False

    @property
    def linear(self) -> bool:
        """Whether encodings made with the same generator may be added, term by term (`terms`), before they are
        decoded.
        """
        return False

    @property
    def contraction(self) -> bool:
        """Whether E||x - decode(encode(x))||² ≤ (1 - delta) ||x||² for a delta > 0, as error feedback requires."""
        return False

    @property
    def sparse(self) -> bool:
        """Whether most elements decode to zero and `stream` returns the other elements."""
        return False

    @property
    def exact_size(self) -> bool:
        """Whether `wire_bytes` is the size of every encoding; otherwise it is the largest possible size."""
        return True

    @property
    def shares_seed(self) -> bool:
        """Whether all senders must use generators in the same state; the run's step number determines this state."""
        return False

    @abstractmethod
    def wire_bytes(self, size: int, dtype: str) -> int:
        """Return the number of bytes that the encoding of `size` elements of `dtype` takes; an upper bound if the size
        depends on the data.
        """

    @abstractmethod
    def encode(self, array: FlatArray, random: np.random.Generator) -> Bytes:
        """Return the encoding of `array`, which does not change.

        Args:
            array: the array to encode, of any shape.
            random: the generator for codecs with random choices.

        Returns:
            A flat array of uint8, of at most `wire_bytes` bytes.

        Raises:
            Diverged: the array contains a NaN or an infinity, which this codec cannot represent.
        """

    @abstractmethod
    def decode(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        """Return the array of shape (size,) that `data` encodes.

        Args:
            data: the bytes that `encode` returned.
            size: number of elements of the encoded array.
            dtype: name of the encoded array's dtype.

        Raises:
            ProtocolError: `data` cannot be the encoding of `size` elements.
        """

    @abstractmethod
    def error_bound(self, array: FlatArray) -> float:
        """Return an upper bound on E||x - decode(encode(x))||² for the array x; for a deterministic codec, on ||x -
        decode(encode(x))||².
        """

    def variance(self, size: int) -> float | None:
        """Return omega with E||x - decode(encode(x))||² ≤ omega ||x||² for all x of the given size; None if there is no
        bound.
        """
        return None

    def add_decoded(self, data: Bytes, out: FlatArray, scale: float = 1.0) -> None:
        """Add scale * decode(data) to `out`, of shape (size,).

        Raises:
            ProtocolError: `data` cannot be the encoding of len(out) elements.
        """
        decoded: Any = self.decode(data, len(out), _name(out))
        factor = decoded.dtype.type(scale) if isinstance(decoded, np.ndarray) else scale
        out += decoded if scale == 1 else decoded * factor

    def encode_residual(self, array: FlatArray, error: FlatArray, random: np.random.Generator) -> Bytes:
        """Encode `error + array`; `error` (size,) becomes the part that the encoding leaves out, (error + array) -
        decoded.
        """
        error += array.reshape(-1)
        data = self.encode(error, random)
        if self.lossless:
            error[:] = 0
        else:
            self.add_decoded(data, error, -1.0)
        return data

    def terms(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        """Return a view of the part of an encoding that may be added to the same part of other senders' encodings; for
        linear codecs only.
        """
        raise NotImplementedError(f"{self} is not linear")

    def stream(self, data: Bytes, size: int, dtype: str) -> tuple[FlatArray, FlatArray]:
        """Return the elements that a sparse codec's encoding contains, as ascending indices (uint32) and values.

        Raises:
            ProtocolError: `data` cannot be the encoding of `size` elements.
        """
        raise NotImplementedError(f"{self} is not sparse")

    def bind_shapes(self, shapes: Sequence[Shape]) -> Codec:
        """Return the codec to use for an array that concatenates tensors of these shapes; by default, the codec
        itself.
        """
        return self

    def bind_step(self, step: int) -> Codec:
        """Return the codec to use in the given step of the run, counted from 0; by default, the codec itself."""
        return self

    def exact_parts(self, size: int) -> list[slice]:
        """Return the slices of an array of `size` elements that always decode exactly."""
        return [slice(0, size)] if self.lossless else []

    def sparse_parts(self, size: int) -> list[slice]:
        """Return the slices of an array of `size` elements from which only some elements are sent."""
        return [slice(0, size)] if self.sparse else []


def _name(array: FlatArray) -> str:
    """Return the name of the dtype of a numpy array or a torch tensor."""
    return str(array.dtype).removeprefix("torch.")
