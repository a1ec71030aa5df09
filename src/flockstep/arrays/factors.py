"""Gradients of fully connected layers as factors: vectors whose outer products sum to the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flockstep.arrays.namespace import empty, namespace
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError


@dataclass(frozen=True, order=True)
class FactoredWeight:
    """A weight (rows, columns) at `offset` of the flat array whose gradient is a sum of `products` outer products.

    A batch of B samples through a fully connected layer gives B products each time the layer is used.
    """

    offset: int
    rows: int
    columns: int
    products: int

    @property
    def dense(self) -> int:
        """Number of elements of the layer's gradient as a dense matrix."""
        return self.rows * self.columns

    @property
    def factors(self) -> int:
        """Number of elements of the layer's two factors U and V for one batch."""
        return self.products * (self.rows + self.columns)

    def within(self, part: slice) -> tuple[FactoredWeight, slice] | None:
        """Return the rows of the layer's weight that lie entirely in a slice of the flat array, as a layer of that
        slice, and the numbers of these rows.

        None if no whole row lies in the slice.
        """
        first = max(0, -((self.offset - part.start) // self.columns))
        last = min(self.rows, (part.stop - self.offset) // self.columns)
        if first >= last:
            return None
        offset = self.offset + first * self.columns - part.start
        return FactoredWeight(offset, last - first, self.columns, self.products), slice(first, last)


class Packing:
    """A flat gradient (K,) with some layers' matrices replaced by factors: the rest, then U and V of each layer.

    U is (products, rows), V (products, columns), and the layer's gradient is Uᵀ V.
    """

    def __init__(self, size: int, layers: Sequence[FactoredWeight]):
        """Describe the packing of an array of `size` elements with the given layers.

        Raises:
            ConfigurationError: layers overlap or do not lie in the array.
        """
        self.layers = sorted(layers)
        bounds = [0]
        for layer in self.layers:
            if layer.offset < bounds[-1] or min(layer.rows, layer.columns, layer.products) < 1:
                raise ConfigurationError(f"{layer} overlaps another layer or is empty; name every layer exactly once")
            bounds += [layer.offset, layer.offset + layer.dense]
        bounds.append(size)
        if bounds[-2] > size:
            raise ConfigurationError(
                f"layers must lie within the {size} elements of the model, got {self.layers[-1]}; use the layers "
                "of this model"
            )
        self.parts = [slice(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True)]
        self.rest = sum(part.stop - part.start for part in self.parts)
        """Number of elements that are sent dense."""
        self.size = self.rest + sum(layer.factors for layer in self.layers)
        """Number of elements of a packed gradient."""

    def pack(self, dense: FlatArray, factors: Sequence[tuple[FlatArray, FlatArray]], out: FlatArray) -> None:
        """Write the packed gradient into the first `size` elements of `out`, which must not share memory with
        `dense`.
        """
        pieces = [dense[part] for part in self.parts]
        for u, v in factors:
            pieces += [u.reshape(-1), v.reshape(-1)]
        namespace(dense).concatenate(pieces, out=out[: self.size])

    def factors(self, packed: FlatArray) -> list[tuple[FlatArray, FlatArray]]:
        """Return U (products, rows) and V (products, columns) of each layer, in order, as views."""
        found, position = [], self.rest
        for layer in self.layers:
            middle, end = position + layer.products * layer.rows, position + layer.factors
            u, v = packed[position:middle], packed[middle:end]
            found.append((u.reshape(-1, layer.rows), v.reshape(-1, layer.columns)))
            position = end
        return found

    def dense(self, packed: FlatArray) -> FlatArray:
        """Return the flat gradient (K,) of a packed gradient."""
        return self.total(packed[: self.rest], [packed[self.rest :]])

    def total(self, rest: FlatArray, factors: Sequence[FlatArray]) -> FlatArray:
        """Return the flat gradient (K,) from `rest`, its elements outside of factored layers, and from the factors of
        several packed gradients, whose products are summed in each layer.
        """
        xp, out = namespace(rest), empty(rest, self.parts[-1].stop)
        position = 0
        for part in self.parts:
            length = part.stop - part.start
            out[part] = rest[position : position + length]
            position += length
        position = 0
        for layer in self.layers:
            middle, end = position + layer.products * layer.rows, position + layer.factors
            u = xp.concatenate([each[position:middle].reshape(-1, layer.rows) for each in factors])
            v = xp.concatenate([each[middle:end].reshape(-1, layer.columns) for each in factors])
            view = out[layer.offset : layer.offset + layer.dense].reshape(layer.rows, layer.columns)
            xp.matmul(u.T, v, out=view)
            position = end
        return out
