"""A codec for concatenated tensors, in which each tensor has its own codec."""

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
    """A codec made of several codecs; it gives the guarantees that all of its members give."""

    @abstractmethod
    def members(self) -> tuple[Codec, ...]:
        """Return the codecs of which the composed codec consists."""

    @property
    def lossless(self) -> bool:
        """Whether all members are lossless."""
        return all(codec.lossless for codec in self.members())

    @property
    def unbiased(self) -> bool:
        """Whether all members are unbiased."""
        return all(codec.unbiased for codec in self.members())

    @property
    def contraction(self) -> bool:
        """Whether all members are contractions or lossless."""
        return all(codec.contraction or codec.lossless for codec in self.members())

    @property
    def exact_size(self) -> bool:
        """Whether all members have an exact size."""
        return all(codec.exact_size for codec in self.members())

    @property
    def shares_seed(self) -> bool:
        """Whether any member requires all senders to use generators in the same state."""
        return any(codec.shares_seed for codec in self.members())


@dataclass(frozen=True)
class Parts(Composed):
    """A codec that concatenates the encodings of its members; an encoding without an exact size is preceded by its
    length as uint32.
    """

    codecs: tuple[Codec, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, codecs: Iterable[Codec], shapes: Sequence[Shape]) -> Parts:
        """Return the codec that uses one of `codecs` for each tensor of these shapes."""
        return cls(tuple(codecs), tuple(map(math.prod, shapes)))

    def members(self) -> tuple[Codec, ...]:
        return self.codecs

    @property
    def sparse(self) -> bool:
        """Whether at least one member is sparse and all other members are lossless."""
        return any(c.sparse for c in self.codecs) and all(c.sparse or c.lossless for c in self.codecs)

    def wire_bytes(self, size: int, dtype: str) -> int:
        each = [(codec, at.stop - at.start) for codec, at in self._each(size)]
        return sum(codec.wire_bytes(n, dtype) + LENGTH_BYTES * (not codec.exact_size) for codec, n in each)

    def variance(self, size: int) -> float | None:
        """Return the largest variance omega among the members, or None if a member has none."""
        found = [0.0 if c.lossless else c.variance(n) for c, n in zip(self.codecs, self.sizes, strict=True)]
        known = [omega for omega in found if omega is not None]
        return max(known, default=0.0) if len(known) == len(found) else None

    def encode(self, array: FlatArray, random: np.random.Generator) -> Bytes:
        flat = array.reshape(-1)
        return self._joined(flat, [codec.encode(flat[part], random) for codec, part in self._each(len(flat))])

    def encode_residual(self, array: FlatArray, error: FlatArray, random: np.random.Generator) -> Bytes:
        flat = array.reshape(-1)
        return self._joined(flat, [c.encode_residual(flat[at], error[at], random) for c, at in self._each(len(flat))])

    def decode(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        """Decode the part of every member, and return the concatenated array.

        Raises:
            ProtocolError: a part cannot be decoded, or the lengths do not match.
        """
        parts = [codec.decode(some, n, dtype) for codec, n, _, some in self._split(data, size, dtype)]
        joined: FlatArray = kernels.of(data).join(*parts) if parts else kernels.of(data).from_bytes(data[:0], dtype)
        return joined

    def add_decoded(self, data: Bytes, out: FlatArray, scale: float = 1.0) -> None:
        """Decode each member's part, and add it to its slice of `out`; if a part is refused, earlier parts may have
        been added.
        """
        for codec, _, at, some in self._split(data, len(out), kernels.name_of(out)):
            codec.add_decoded(some, out[at], scale)

    def stream(self, data: Bytes, size: int, dtype: str) -> tuple[FlatArray, FlatArray]:
        """Return the elements that the sparse parts contain, and all elements of the lossless parts, as indices and
        values.
        """
        k, indices, values = kernels.of(data), [], []
        all_of = partial(k.all_indices, data)
        for codec, n, at, some in self._split(data, size, dtype):
            spots, sent = codec.stream(some, n, dtype) if codec.sparse else (all_of(n), codec.decode(some, n, dtype))
            indices.append(k.shifted(spots, at.start))
            values.append(sent)
        return k.join(k.all_indices(data, 0), *indices), k.join(k.from_bytes(data[:0], dtype), *values)

    def error_bound(self, array: FlatArray) -> float:
        flat = array.reshape(-1)
        return sum(codec.error_bound(flat[part]) for codec, part in self._each(len(flat)))

    def bind_step(self, step: int) -> Codec:
        return replace(self, codecs=tuple(codec.bind_step(step) for codec in self.codecs))

    def exact_parts(self, size: int) -> list[slice]:
        return [p for codec, at in self._each(size) for p in _moved(codec.exact_parts(at.stop - at.start), at.start)]

    def sparse_parts(self, size: int) -> list[slice]:
        return [p for codec, at in self._each(size) for p in _moved(codec.sparse_parts(at.stop - at.start), at.start)]

    def _each(self, size: int) -> Sequence[tuple[Codec, slice]]:
        if size != sum(self.sizes):
            raise ConfigurationError(
                f"{self} encodes {sum(self.sizes)} elements, got {size}; bind the codec to the tensors of this model"
            )
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
            raise ProtocolError(f"{self} needs {place} bytes for {size} elements of {dtype}, got {len(data)}")
        return found


def _moved(parts: list[slice], by: int) -> list[slice]:
    return [slice(by + part.start, by + part.stop) for part in parts]
