"""A codec combined with its feedback: the bytes that a sender makes of each array, and the facts that its receivers
must know.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from flockstep.codecs.base import Codec, Shape
from flockstep.codecs.damped import damped
from flockstep.errors import CompositionError
from flockstep.feedback.base import Feedback


def check_composition(codec: Codec, feedback: Feedback) -> None:
    """Check that the feedback does not diverge with the codec.

    Raises:
        CompositionError: the feedback needs a contraction, and the codec cannot be made one.
    """
    if feedback.needs_contraction and not (codec.contraction or codec.lossless or codec.variance(1) is not None):
        raise CompositionError(
            f"feedback {feedback} needs a codec that is a contraction, got {codec}, whose error may grow without "
            "bound; use feedback none, or a contraction such as half"
        )


@lru_cache(maxsize=1024)
def bound_codec(codec: Codec, feedback: Feedback, shapes: tuple[Shape, ...], step: int) -> Codec:
    """Return the codec that both sender and receiver use for tensors of these shapes at a step.

    Under feedback that needs a contraction, an unbiased codec of variance omega is damped by 1 / (1 + omega), which
    makes it a contraction (Richtárik, Sokolov & Fatkhullin 2021, lemma 8).
    """
    chosen = codec.bind_shapes(shapes).bind_step(step)
    if feedback.needs_contraction and not (chosen.contraction or chosen.lossless):
        return damped(chosen)
    return chosen


def random_of(codec: Codec, own: np.random.Generator, step: int) -> np.random.Generator:
    """Return the generator for an encoding: the node's own generator, or the generator that all nodes share in the
    given step.
    """
    return np.random.default_rng((0x5EED, step)) if codec.shares_seed else own
