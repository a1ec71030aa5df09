"""Activations that travel between stages as differences from those of the same sample in an earlier step (AQ-SGD)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec, Shape

CodecOf = Callable[[Shape], Codec]
"""Function that takes the shape of an array and returns the codec for the array."""


class ActivationDifferences:
    """One end of a link between two stages, with the activations m of each sample that the receiver knows (AQ-SGD, Wang
    et al. 2022).

    A sample's activations a travel unencoded the first time, m ← a. Later, only the encoded difference C(a - m)
    travels, and both ends compute m ← m + C(a - m), with which the receiver continues. The encoding error shrinks as
    the weights converge, because the activations of a sample then change little between two passes over it.
    """

    def __init__(self) -> None:
        self._known: dict[int, FlatArray] = {}
        """Sample → the activations that both ends hold."""

    def encode(self, array: FlatArray, samples: Sequence[int], codec_of: CodecOf, random: np.random.Generator) -> Bytes:
        """Return the bytes to send for the activations (B, …) of B samples."""
        new, old = self._new(samples), self._old(samples, array)
        changes = array[~new] - old
        data = np.frombuffer(array[new].tobytes(), np.uint8)
        if changes.size:
            data = np.concatenate([data, codec_of(changes.shape).encode(changes.reshape(-1), random)])
        self.decode(data, array.shape, array.dtype.name, samples, codec_of)
        return data

    def decode(self, data: Bytes, shape: Shape, dtype: str, samples: Sequence[int], codec_of: CodecOf) -> FlatArray:
        """Return the activations of the given shape (B, …) that `data` encodes, and remember them."""
        new = self._new(samples)
        found = np.empty(shape, dtype)
        width = math.prod(shape[1:])
        split = int(new.sum()) * width * found.itemsize
        found[new] = data[:split].view(dtype).reshape(-1, *shape[1:])
        if not new.all():
            old = self._old(samples, found)
            changes = codec_of(old.shape).decode(data[split:], old.size, dtype)
            found[~new] = old + changes.reshape(old.shape)
        self._known.update((sample, row.copy()) for sample, row in zip(samples, found, strict=True))
        return found

    def _new(self, samples: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which samples both ends see for the first time."""
        return np.array([one not in self._known for one in samples])

    def _old(self, samples: Sequence[int], like: FlatArray) -> FlatArray:
        """The activations that both ends hold, of those samples that they have seen."""
        found = [self._known[one] for one in samples if one in self._known]
        return np.stack(found) if found else like[:0]
