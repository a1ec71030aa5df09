"""The contract of a codec."""

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
    """Array → bytes → array. What it promises is said by its properties, and checked by `flockstep.testing.codecs`.

    An array to encode may have any shape and may lie in memory in any way; it is taken as flat. Its elements are
    float16, bfloat16, float32 or float64. Written over the kernels of `flockstep.arrays.kernels`, a codec takes numpy
    arrays and torch tensors alike and gives bytes of the same kind.
    """

    noun: ClassVar[str] = "codec"

    @property
    def lossless(self) -> bool:
        """decode(encode(x)) equals x in every bit."""
        return False

    @property
    def unbiased(self) -> bool:
        """The mean of decode(encode(x)) over the codec's own randomness is x."""
        return False

    @property
    def linear(self) -> bool:
        """Encodings made with the same generator may be added, term by term, before they are decoded: `terms`."""
        return False

    @property
    def contraction(self) -> bool:
        """E||x - decode(encode(x))||² ≤ (1 - delta) ||x||² for a delta > 0: safe under error feedback."""
        return False

    @property
    def sparse(self) -> bool:
        """Most elements decode to zero, and `stream` gives the others."""
        return False

    @property
    def exact_size(self) -> bool:
        """`wire_bytes` is the size of every encoding; otherwise it is the largest that one can have."""
        return True

    @property
    def shares_seed(self) -> bool:
        """All who take part have to encode with a generator in the same state, which the run's step number gives."""
        return False

    @abstractmethod
    def wire_bytes(self, size: int, dtype: str) -> int:
        """Exact bytes that `size` elements of `dtype` take on the wire; the most, where the data decide."""

    @abstractmethod
    def encode(self, array: FlatArray, random: np.random.Generator) -> Bytes:
        """The bytes for `array`, which is left as it is.

        Raises:
            Diverged: it holds a NaN or an infinity, which this codec cannot say.
        """

    @abstractmethod
    def decode(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        """The array (size,) that `data` stands for.

        Raises:
            ProtocolError: `data` cannot be the encoding of `size` elements.
        """

    @abstractmethod
    def error_bound(self, array: FlatArray) -> float:
        """What E||x - decode(encode(x))||² is at most, for this x: for deterministic codecs of every encoding."""

    def variance(self, size: int) -> float | None:
        """omega with E||x - decode(encode(x))||² ≤ omega ||x||² for all x of that size; None where there is none."""
        return None

    def add_decoded(self, data: Bytes, out: FlatArray, scale: float = 1.0) -> None:
        """out (size,) += scale * decode(data).

        Raises:
            ProtocolError: `data` cannot be the encoding of so many elements.
        """
        decoded: Any = self.decode(data, len(out), _name(out))
        factor = decoded.dtype.type(scale) if isinstance(decoded, np.ndarray) else scale
        out += decoded if scale == 1 else decoded * factor

    def encode_residual(self, array: FlatArray, error: FlatArray, random: np.random.Generator) -> Bytes:
        """The bytes for `error + array`; `error` (size,) becomes what they leave out, (error + array) - decoded."""
        error += array.reshape(-1)
        data = self.encode(error, random)
        if self.lossless:
            error[:] = 0
        else:
            error -= self.decode(data, len(error), _name(error))
        return data

    def terms(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        """The part of an encoding that is added up, as a view: of linear codecs only."""
        raise NotImplementedError(f"{self} is not linear")

    def stream(self, data: Bytes, size: int, dtype: str) -> tuple[FlatArray, FlatArray]:
        """The elements that an encoding names: ascending indices (uint32) and their values; of sparse codecs only.

        Raises:
            ProtocolError: `data` cannot be the encoding of `size` elements.
        """
        raise NotImplementedError(f"{self} is not sparse")

    def on(self, shapes: Sequence[Shape]) -> Codec:
        """The codec for arrays that hold tensors of these shapes in a row; itself where it does not matter."""
        return self

    def at(self, step: int) -> Codec:
        """The codec of that step of the run, from 0; itself where it does not matter."""
        return self

    def exact_parts(self, size: int) -> list[slice]:
        """Which parts of `size` elements arrive as they are, whatever they hold."""
        return [slice(0, size)] if self.lossless else []

    def sparse_parts(self, size: int) -> list[slice]:
        """Of which parts of `size` elements only some are sent."""
        return [slice(0, size)] if self.sparse else []


def _name(array: FlatArray) -> str:
    """The dtype's name, of a numpy array or a torch tensor."""
    return str(array.dtype).removeprefix("torch.")
