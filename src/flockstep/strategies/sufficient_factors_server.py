"""A parameter server to which fully connected layers travel as vectors, where that is smaller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from flockstep.arrays.factors import Layer, Packing
from flockstep.arrays.schema import FlatArray, slices
from flockstep.errors import CompositionError, ConfigurationError, ProtocolError
from flockstep.expression import SHOWN
from flockstep.messages import Address, Fields, Message, server
from flockstep.nodes import Server, Worker
from flockstep.strategies.base import Traits
from flockstep.strategies.consistency import Asynchronous, Consistency
from flockstep.strategies.parameter_server import ParameterServer
from flockstep.strategies.server_state import PushState
from flockstep.strategies.sufficient_factors import require_layers


@dataclass(frozen=True)
class FactorServer(ParameterServer):
    """Parameter server to which workers push activations and errors (Project Adam: Chilimbi et al. 2014, section 3.3).

    For a fully connected M × N layer a worker pushes U (B, M), the errors, and V (B, N), the activations, where
    B (M + N) < MN, and the server computes the gradient Uᵀ V; parameters come back whole. A shard that holds some rows
    of a layer gets those columns of U, and all of V. Everything else is the parameter server of `consistency` and
    `rule`, from which this differs by rounding alone.
    """

    consistency: Consistency = field(default_factory=Asynchronous, metadata=SHOWN)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.consistency.keeps_copies or self.consistency.gives_up:
            raise CompositionError(
                "factors are pushed and answered, so consistency must neither keep copies nor give up gradients, "
                f"got {self.consistency}; use ps"
            )
        if self.filters:
            raise CompositionError(f"factors are sent as they are, so filters must be (), got {self.filters}; use ps")
        if not self.codec.lossless:
            raise CompositionError(f"factors are sent as they are, so codec must be identity, got {self.codec}; use ps")

    @property
    def traits(self) -> Traits:
        """As a parameter server, for declared jobs; the factors of the first layer are its inputs: the samples."""
        return replace(super().traits, needs_job=True, samples="sent")

    def worker_state(self, me: Worker) -> PushState:
        """As a parameter server's, but layers must be there."""
        require_layers(self, me)
        return super().worker_state(me)

    async def worker(self, me: Worker) -> None:
        """Compute, push in the smaller form, take the parameters that come back."""
        state: PushState = me.state
        layers = tuple(layer for layer in me.layers if layer.factors < layer.dense)
        parts = slices(len(me.params), self.shards)
        while me.training:
            packed = await (me.gradient_in_factors(layers) if layers else me.gradient())
            pushes: list[tuple[Address, FlatArray, Fields]] = []
            for i, (there, payload) in enumerate(divided(packed, Packing(len(me.params), layers), parts)):
                note: Fields = {"version": state.versions[i], "lr": me.lr, "layers": to_text(there)}
                pushes.append((server(i), payload, note))
            for i, reply in enumerate(await me.ask_all("push", pushes)):
                me.params[parts[i]] = reply.payload
                state.versions[i] = int(reply.note["version"])

    def decode(self, me: Server, message: Message) -> FlatArray:
        """The gradient (K,), multiplied out of its factors."""
        return unpacked(message, len(me.params))


def divided(
    packed: FlatArray, packing: Packing, parts: Sequence[slice]
) -> Iterator[tuple[tuple[Layer, ...], FlatArray]]:
    """For each part of the array: the layers, and rows of layers, that are smaller as factors, and its gradient packed.

    Rows that lie in two parts are sent as they are.
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
        out = np.empty(there.size, packed.dtype)
        there.pack(dense[part], [(u[:, rows], v) for _, rows, (u, v) in kept], out)
        yield layers, out


def to_text(layers: tuple[Layer, ...]) -> str:
    """What a push says of the layers that it holds factors of."""
    return " ".join(f"{layer.offset},{layer.rows},{layer.columns},{layer.products}" for layer in layers)


def unpacked(message: Message, size: int) -> FlatArray:
    """The gradient (K,) that a push stands for.

    Raises:
        ProtocolError: what it says does not fit its payload, or the model.
    """
    text, packed = str(message.note["layers"]), message.payload
    if not text:
        return packed
    try:
        packing = Packing(size, [Layer(*map(int, layer.split(","))) for layer in text.split()])
    except (ValueError, TypeError, ConfigurationError) as error:
        raise ProtocolError(f"worker {message.source} sent factors of layers {text!r}: {error}") from None
    if packed.size != packing.size:
        raise ProtocolError(
            f"worker {message.source} sent {packed.size} elements for layers {text!r}, which need {packing.size}"
        )
    return packing.dense(packed)
