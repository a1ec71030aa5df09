"""A codec and its feedback, joined: what a sender does with each array, and what its receivers have to know."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec, Shape
from flockstep.codecs.damped import damped
from flockstep.errors import CompositionError
from flockstep.feedback.base import Feedback


def check_composition(codec: Codec, feedback: Feedback) -> None:
    """Raise `CompositionError` where this feedback would diverge with this codec."""
    if feedback.needs_contraction and not (codec.contraction or codec.lossless or codec.variance(1) is not None):
        raise CompositionError(
            f"feedback {feedback} needs a codec that is a contraction, got {codec}, with which its error may grow "
            f"without bound; use feedback none, or a contraction such as half"
        )


@lru_cache(maxsize=1024)
def fitted(codec: Codec, feedback: Feedback, shapes: tuple[Shape, ...], step: int) -> Codec:
    """What `codec` comes to for tensors of these shapes at that step, at both ends.

    Under feedback that needs a contraction, an unbiased codec of variance omega is damped by 1 / (1 + omega), which
    makes it one (Richtárik, Sokolov & Fatkhullin 2021, lemma 8).
    """
    chosen = codec.on(shapes).at(step)
    if feedback.needs_contraction and not (chosen.contraction or chosen.lossless):
        return damped(chosen)
    return chosen


def random_of(codec: Codec, own: np.random.Generator, step: int) -> np.random.Generator:
    """The generator to encode with: a node's own, or the one that all share in that step."""
    return np.random.default_rng((0x5EED, step)) if codec.shares_seed else own


def encode(
    codec: Codec, feedback: Feedback, array: FlatArray, memory: Any, random: np.random.Generator
) -> tuple[Bytes, Any]:
    """The bytes to send for `array`, given what was kept so far, and what to keep from now on."""
    return feedback.encode(codec, array, memory, random)
