"""Several tensors in a row, each with a codec of its own."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from flockstep.arrays import kernels
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec, Shape
from flockstep.errors import ConfigurationError, ProtocolError

LENGTH_BYTES = 4


class Composed(Codec):
    """Promises what all of its codecs do."""

    @abstractmethod
    def members(self) -> tuple[Codec, ...]:
        """Its codecs."""

    @property
    def lossless(self) -> bool:
        """If all are."""
        return all(codec.lossless for codec in self.members())

    @property
    def unbiased(self) -> bool:
        """If all are."""
        return all(codec.unbiased for codec in self.members())

    @property
    def contraction(self) -> bool:
        """If all are."""
        return all(codec.contraction or codec.lossless for codec in self.members())

    @property
    def exact_size(self) -> bool:
        """If all have one."""
        return all(codec.exact_size for codec in self.members())

    @property
    def shares_seed(self) -> bool:
        """If one does."""
        return any(codec.shares_seed for codec in self.members())


@dataclass(frozen=True)
class Parts(Composed):
    """Encodings one after the other; one whose size the data decide has its length in front, as uint32."""

    codecs: tuple[Codec, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, codecs: Iterable[Codec], shapes: Sequence[Shape]) -> Parts:
        """A codec for each tensor of these shapes."""
        return cls(tuple(codecs), tuple(map(math.prod, shapes)))

    def members(self) -> tuple[Codec, ...]:
        """One a part."""
        return self.codecs

    @property
    def sparse(self) -> bool:
        """If some are, and the others lose nothing."""
        return any(c.sparse for c in self.codecs) and all(c.sparse or c.lossless for c in self.codecs)

    def wire_bytes(self, size: int, dtype: str) -> int:
        """The sum, with the lengths."""
        each = [(codec, at.stop - at.start) for codec, at in self._each(size)]
        return sum(codec.wire_bytes(n, dtype) + LENGTH_BYTES * (not codec.exact_size) for codec, n in each)

    def variance(self, size: int) -> float | None:
        """The largest."""
        found = [0.0 if c.lossless else c.variance(n) for c, n in zip(self.codecs, self.sizes, strict=True)]
        known = [omega for omega in found if omega is not None]
        return max(known, default=0.0) if len(known) == len(found) else None

    def encode(self, array: FlatArray, random: np.random.Generator) -> Bytes:
        """Part after part."""
        flat = array.reshape(-1)
        return self._joined(flat, [codec.encode(flat[part], random) for codec, part in self._each(len(flat))])

    def encode_residual(self, array: FlatArray, error: FlatArray, random: np.random.Generator) -> Bytes:
        """Part after part, each with its own rule for what it keeps."""
        flat = array.reshape(-1)
        return self._joined(flat, [c.encode_residual(flat[at], error[at], random) for c, at in self._each(len(flat))])

    def decode(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        """All parts in a row.

        Raises:
            ProtocolError: one of them cannot be, or the lengths do not fit.
        """
        parts = [codec.decode(some, n, dtype) for codec, n, _, some in self._split(data, size, dtype)]
        joined: FlatArray = kernels.of(data).join(*parts) if parts else kernels.of(data).from_bytes(data[:0], dtype)
        return joined

    def add_decoded(self, data: Bytes, out: FlatArray, scale: float = 1.0) -> None:
        """Part by part; what is refused may leave earlier parts added."""
        for codec, _, at, some in self._split(data, len(out), kernels.name_of(out)):
            codec.add_decoded(some, out[at], scale)

    def stream(self, data: Bytes, size: int, dtype: str) -> tuple[FlatArray, FlatArray]:
        """What the parts send; all elements of those that lose nothing."""
        k, indices, values = kernels.of(data), [], []
        all_of = partial(k.all_indices, data)
        for codec, n, at, some in self._split(data, size, dtype):
            spots, sent = codec.stream(some, n, dtype) if codec.sparse else (all_of(n), codec.decode(some, n, dtype))
            indices.append(k.shifted(spots, at.start))
            values.append(sent)
        return k.join(k.all_indices(data, 0), *indices), k.join(k.from_bytes(data[:0], dtype), *values)

    def error_bound(self, array: FlatArray) -> float:
        """The sum."""
        flat = array.reshape(-1)
        return sum(codec.error_bound(flat[part]) for codec, part in self._each(len(flat)))

    def at(self, step: int) -> Codec:
        """All parts at that step."""
        return replace(self, codecs=tuple(codec.at(step) for codec in self.codecs))

    def exact_parts(self, size: int) -> list[slice]:
        """Those of the parts, where they lie."""
        return [p for codec, at in self._each(size) for p in _moved(codec.exact_parts(at.stop - at.start), at.start)]

    def sparse_parts(self, size: int) -> list[slice]:
        """Those of the parts, where they lie."""
        return [p for codec, at in self._each(size) for p in _moved(codec.sparse_parts(at.stop - at.start), at.start)]

    def _each(self, size: int) -> Sequence[tuple[Codec, slice]]:
        if size != sum(self.sizes):
            raise ConfigurationError(f"{self} is for {sum(self.sizes)} elements, got {size}; bind it to those tensors")
        stops = np.cumsum(self.sizes, dtype=np.int64).tolist()
        return [(c, slice(e - n, e)) for c, n, e in zip(self.codecs, self.sizes, stops, strict=True)]

    def _joined(self, like: FlatArray, encodings: list[Bytes]) -> Bytes:
        k, pieces = kernels.of(like), []
        for codec, data in zip(self.codecs, encodings, strict=True):
            pieces += [data] if codec.exact_size else [k.number_bytes(like, len(data), LENGTH_BYTES), data]
        joined: Bytes = k.join(*pieces) if pieces else k.as_bytes(like)
        return joined

    def _split(self, data: Bytes, size: int, dtype: str) -> list[tuple[Codec, int, slice, Bytes]]:
        place, found = 0, []
        for codec, at in self._each(size):
            n = at.stop - at.start
            length = codec.wire_bytes(n, dtype)
            if not codec.exact_size:
                length = int.from_bytes(bytes(data[place : place + LENGTH_BYTES].tolist()), "little")
                place += LENGTH_BYTES
            found.append((codec, n, at, data[place : place + length]))
            place += length
        if place != len(data):
            raise ProtocolError(f"{self} got {len(data)} bytes for {size} {dtype}, whose parts take {place}")
        return found


def _moved(parts: list[slice], by: int) -> list[slice]:
    return [slice(by + part.start, by + part.stop) for part in parts]
