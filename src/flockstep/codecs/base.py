"""The contract of a codec."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from flockstep.arrays.schema import FlatArray
from flockstep.expression import Component

Bytes = npt.NDArray[np.uint8]


class Codec(Component):
    """Array → bytes → array, with a wire size that is known before anything is encoded."""

    noun: ClassVar[str] = "codec"
    lossless: ClassVar[bool]
    """decode(encode(x)) equals x in every bit."""
    unbiased: ClassVar[bool]
    """The mean of decode(encode(x)) over the codec's own randomness is x."""
    linear: ClassVar[bool]
    """decode(a) + decode(b) can be computed by adding in encoded form."""
    contraction: ClassVar[bool]
    """||x - decode(encode(x))||² ≤ (1 - delta) ||x||² for a delta > 0: safe under error feedback."""

    @abstractmethod
    def wire_bytes(self, size: int, dtype: str) -> int:
        """Exact bytes that `size` elements of `dtype` take on the wire."""

    @abstractmethod
    def encode(self, array: FlatArray, random: np.random.Generator) -> Bytes:
        """The bytes for `array` (1-D), which is left as it is."""

    @abstractmethod
    def decode(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        """The array that `data` stands for.

        Raises:
            ProtocolError: `data` cannot be the encoding of `size` elements.
        """
