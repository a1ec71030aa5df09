"""A parameter server to which workers push the gradients of fully connected layers as factors if the factors are
smaller.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

from flockstep.arrays.factors import FactoredWeight, Packing
from flockstep.arrays.namespace import empty
from flockstep.arrays.schema import FlatArray
from flockstep.errors import CompositionError, ConfigurationError, ProtocolError
from flockstep.expression import SHOWN
from flockstep.messages import Address, Message, Notes
from flockstep.nodes import Server, Worker
from flockstep.strategies.access import Access, Pushed, PushPull
from flockstep.strategies.base import Traits
from flockstep.strategies.consistency import Asynchronous, Consistency
from flockstep.strategies.finite import accepted
from flockstep.strategies.parameter_server import ParameterServer
from flockstep.strategies.server_state import PushState
from flockstep.strategies.sufficient_factors import require_layers

Rectangle = tuple[int, int, int, int]
"""The position of a layer's weights in the parameters: offset, number of rows, number of columns, and number of
products in the sum Uᵀ V.
"""


class Factored(Pushed, frozen=True):
    """Note sent with a gradient that contains the factors of some layers: the positions of these layers."""

    layers: list[Rectangle]


@dataclass(frozen=True)
class PushFactors(PushPull):
    """Access mode in which every push also requests the parameters, and layers of a gradient are pushed as factors
    where the factors are smaller.
    """

    def gradient(self, me: Worker, state: PushState) -> Awaitable[FlatArray]:
        layers = smaller(me)
        return me.gradient_in_factors(layers) if layers else me.gradient()


@dataclass(frozen=True)
class FactorServer(ParameterServer):
    """Parameter server to which workers push activations and errors (Project Adam: Chilimbi et al. 2014, section 3.3).

    For a fully connected M × N layer a worker pushes U (B, M), the errors, and V (B, N), the activations, if B (M + N)
    < MN, and the server computes the gradient Uᵀ V; parameters are sent whole. A shard that holds some rows of a layer
    gets the corresponding columns of U, and all of V. Everything else is as in the parameter server with `consistency`
    and `server_update`, from which the results differ only by rounding.
    """

    notes: ClassVar[Notes] = {**ParameterServer.notes, "push": Factored}

    consistency: Consistency = field(default_factory=Asynchronous, metadata=SHOWN)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.consistency.access, PushPull):
            raise CompositionError(
                "servers of factors answer every push, so consistency must neither keep copies nor drop gradients, "
                f"got {self.consistency}; use ps for such a consistency"
            )
        if self.filters:
            raise CompositionError(
                f"factors are sent without filters, so filters must be (), got {self.filters}; use ps with filters"
            )
        if not self.codec.lossless:
            raise CompositionError(
                f"factors are sent unencoded, so codec must be identity, got {self.codec}; use ps with a codec"
            )

    @property
    def traits(self) -> Traits:
        """The strategy's traits: those of a parameter server that needs a declared job. The factors of the first layer
        contain the layer's inputs, so messages carry samples.
        """
        return replace(super().traits, needs_job=True, samples="sent")

    def worker_state(self, me: Worker) -> PushState:
        """Return the worker's state, which is that of a parameter server's worker.

        Raises:
            CompositionError: the model has no layer that can be factored.
        """
        require_layers(self, me)
        return super().worker_state(me)

    @cached_property
    def _access(self) -> Access:
        return PushFactors()

    def pushes(
        self, me: Worker, state: PushState, gradient: FlatArray, parts: Mapping[Address, slice]
    ) -> list[tuple[Address, FlatArray, Pushed]]:
        """Return the push to each shard, with each layer in the smaller of its two forms, factors or gradient."""
        packing = Packing(len(me.params), smaller(me))
        return [
            (to, payload, Factored(version, me.lr, [rectangle(layer) for layer in layers]))
            for to, version, (layers, payload) in zip(
                parts, state.versions, divided(gradient, packing, [*parts.values()]), strict=True
            )
        ]

    def decode(self, me: Server, message: Message) -> FlatArray:
        """Return the gradient (K,) that a push contains, with the factors multiplied out."""
        gradient = unpacked(message, len(me.params))
        return accepted(me, message, gradient)


def divided(
    packed: FlatArray, packing: Packing, parts: Sequence[slice]
) -> Iterator[tuple[tuple[FactoredWeight, ...], FlatArray]]:
    """Yield, for each slice of the gradient, the layers (or rows of layers) that are smaller as factors, and the packed
    gradient of the slice.

    A row that belongs to two slices is sent dense.
    """
    if len(parts) == 1 or not packing.layers:
        yield from ((tuple(packing.layers), packed[part] if len(parts) > 1 else packed) for part in parts)
        return
    dense, factors = packing.dense(packed), packing.factors(packed)
    for part in parts:
        cut = [(layer.within(part), uv) for layer, uv in zip(packing.layers, factors, strict=True)]
        kept = [(*found, uv) for found, uv in cut if found is not None and found[0].factors < found[0].dense]
        layers = tuple(layer for layer, _, _ in kept)
        there = Packing(part.stop - part.start, layers)
        out = empty(packed, there.size)
        there.pack(dense[part], [(u[:, rows], v) for _, rows, (u, v) in kept], out)
        yield layers, out


def smaller(me: Worker) -> tuple[FactoredWeight, ...]:
    """Return the layers whose factors have fewer elements than their dense gradients."""
    return tuple(layer for layer in me.layers if layer.factors < layer.dense)


def rectangle(layer: FactoredWeight) -> Rectangle:
    """Return the position of a layer's weights, in the form in which a push contains it."""
    return layer.offset, layer.rows, layer.columns, layer.products


def unpacked(message: Message, size: int) -> FlatArray:
    """Return the gradient (K,) that a push contains.

    Raises:
        ProtocolError: the layers in the note do not fit the payload or the model.
    """
    layers, packed = message.note.layers, message.payload
    if not layers:
        return packed
    try:
        packing = Packing(size, [FactoredWeight(*layer) for layer in layers])
    except (ValueError, ConfigurationError) as error:
        raise ProtocolError(f"worker {message.source} sent wrong factors of layers {layers}: {error}") from None
    if len(packed) != packing.size:
        raise ProtocolError(
            f"worker {message.source} sent {len(packed)} elements for layers {layers}, which need {packing.size}"
        )
    return packing.dense(packed)
