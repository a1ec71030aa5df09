"""Momentum correction: what the codec dropped is kept as velocity, not as gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from flockstep.arrays.kernels import name_of
from flockstep.arrays.namespace import cast, copied, namespace
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.errors import ConfigurationError
from flockstep.feedback.base import Feedback


class Memory(NamedTuple):
    """What a sender keeps, both (K,): its momentum u, and v, what of the momenta so far it has not sent."""

    u: FlatArray
    v: FlatArray


@dataclass(frozen=True)
class Momentum(Feedback):
    """u ← m u + g, v ← v + u, send C(v), keep v less what was sent (Lin et al. 2018, DGC, sections 3.1 to 3.3).

    Momentum correction in the sense of Lin et al.: what is kept back is velocity, so that an element which is sent late
    has moved as far as momentum SGD would have moved it. The momentum correction of Goyal et al. 2017 is another claim,
    about learning rates that change while they are part of the velocity; see the schedule goyal.

    `nesterov`: u ← m (u + g), v ← v + u + g. `masking`: where something was sent, u and v become zero, lest stale
    momentum carries the element on; not where a codec sends something of every element, as half does. `clip`: a
    gradient (or the part of one that goes to one receiver) of a larger norm than clip·N^-1/2 is scaled down to that
    before anything else, for N senders whose arrays are averaged. Elements that the codec sends as they are have plain
    momentum: u is sent and kept, v stays zero. The receivers' optimiser should have no momentum of its own.

    Without masking, the sum of all that was sent, and v, is the sum of all u, coordinate by coordinate.
    """

    m: float = 0.9
    nesterov: bool = False
    masking: bool = True
    clip: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.m < 1:
            raise ConfigurationError(f"momentum needs m from 0 to below 1, got {self.m}; 0.9 is usual")
        if self.clip is not None and not self.clip > 0:
            raise ConfigurationError(
                f"momentum needs a clip above 0, got {self.clip}; none leaves gradients as they are"
            )

    needs_contraction = True
    """What is kept grows without bound if less comes off it than goes on."""

    def among(self, workers: int) -> Feedback:
        """With clip·N^-1/2, so that a sum of N independent gradients would be clipped at `clip`."""
        return self if self.clip is None else replace(self, clip=self.clip * workers**-0.5)

    def encode(self, codec: Codec, array: FlatArray, memory: Any, random: np.random.Generator) -> tuple[Bytes, Any]:
        """The encoding of v + u; the memory is u and v."""
        gradient, zeros = self._clipped(array.reshape(-1)), namespace(array).zeros_like
        kept = Memory(zeros(gradient), zeros(gradient)) if memory is None else memory
        u, v = kept
        if self.nesterov:
            u += gradient
            u *= self.m
            step = u + gradient
        else:
            u *= self.m
            u += gradient
            step = u
        data = codec.encode_residual(step, v, random)
        if self.masking:
            sent = self._sent(codec, data, v)
            u[sent] = 0
            v[sent] = 0
        return data, kept

    def _clipped(self, gradient: FlatArray) -> FlatArray:
        if self.clip is None:
            return gradient
        wide = cast(gradient, "float64")
        norm = math.sqrt(float(wide @ wide))
        if norm > self.clip:
            gradient = copied(gradient)
            gradient *= self.clip / norm  # in place, for numpy would widen bfloat16
        return gradient

    @staticmethod
    def _sent(codec: Codec, data: Bytes, v: FlatArray) -> Any:
        """Where something was sent that might not have been."""
        size, dtype, parts = len(v), name_of(v), codec.sparse_parts(len(v))
        if parts == [slice(0, size)] and codec.sparse:
            return codec.stream(data, size, dtype)[0]
        chosen = cast(namespace(v).zeros_like(v), "bool")
        for part in parts:
            chosen[part] = True
        if codec.sparse:
            sent = codec.stream(data, size, dtype)[0]
            return sent[chosen[sent]]
        return chosen & (codec.decode(data, size, dtype) != 0)
