"""Momentum correction: dropped values are kept as velocity, not as gradient."""

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


class MomentumMemory(NamedTuple):
    """A sender's memory, two arrays of shape (K,): its momentum u, and v, the sum of momenta not sent yet."""

    u: FlatArray
    v: FlatArray


@dataclass(frozen=True)
class Momentum(Feedback):
    """DGC's momentum correction (Lin et al. 2018, sections 3.1 to 3.3): u ← m u + g, v ← v + u, send C(v), keep the
    rest.

    Momentum correction in the sense of Lin et al. keeps velocity, so that an element that is sent late moves as far as
    momentum SGD would have moved it. Goyal et al. 2017 use the same name for a different correction, for learning rates
    that change while they are part of the velocity; see the schedule goyal.

    `nesterov`: u ← m (u + g), v ← v + u + g. With `masking`, u and v become zero for each element that was sent, so
    that stale momentum does not move the element further; codecs that send something of every element, such as half,
    are not masked. With `clip`, a gradient (or the slice of it that goes to one receiver) with a norm above clip·N^-1/2
    is first scaled down to that norm, for N senders whose arrays are averaged. Elements that the codec sends exactly
    have plain momentum: u is sent and kept, and v stays zero. The receivers' optimizer should have no momentum.

    Without masking, the sum of everything sent plus v equals the sum of all u, element by element.
    """

    m: float = 0.9
    nesterov: bool = False
    masking: bool = True
    clip: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.m < 1:
            raise ConfigurationError(f"momentum needs 0 <= m < 1, got {self.m}; 0.9 is usual")
        if self.clip is not None and not self.clip > 0:
            raise ConfigurationError(f"momentum needs clip > 0, got {self.clip}; none turns clipping off")

    needs_contraction = True
    """True, because with a codec that is not a contraction the memory could grow without bound."""

    def bind_workers(self, workers: int) -> Feedback:
        """Return the feedback with clip·N^-1/2, so that the sum of N independent gradients would be clipped at
        `clip`.
        """
        return self if self.clip is None else replace(self, clip=self.clip * workers**-0.5)

    def encode(self, codec: Codec, array: FlatArray, memory: Any, random: np.random.Generator) -> tuple[Bytes, Any]:
        """Encode v + u, and return the bytes with the new memory (u and v)."""
        gradient, zeros = self._clipped(array.reshape(-1)), namespace(array).zeros_like
        kept = MomentumMemory(zeros(gradient), zeros(gradient)) if memory is None else memory
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
            gradient *= self.clip / norm  # in place, because numpy would widen bfloat16
        return gradient

    @staticmethod
    def _sent(codec: Codec, data: Bytes, v: FlatArray) -> Any:
        """Return the positions that were sent and might not have been."""
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
