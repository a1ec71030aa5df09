"""A codec and its feedback, joined: what a sender does with each array."""

from __future__ import annotations

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.errors import CompositionError
from flockstep.feedback.base import Feedback


def check_composition(codec: Codec, feedback: Feedback) -> None:
    """Raise `CompositionError` where this feedback would diverge with this codec."""
    if feedback.needs_contraction and not (codec.contraction or codec.lossless):
        raise CompositionError(
            f"feedback {feedback} needs a codec that is a contraction, got {codec}, with which its error may grow "
            f"without bound; use feedback none, or a contraction such as half"
        )


def encode(
    codec: Codec, feedback: Feedback, array: FlatArray, error: FlatArray | None, random: np.random.Generator
) -> tuple[Bytes, FlatArray | None]:
    """The bytes to send for `array`, given the error kept so far, and the error to keep from now on."""
    wanted = feedback.before(array, error)
    data = codec.encode(wanted, random)
    sent = wanted if codec.lossless else codec.decode(data, wanted.size, wanted.dtype.name)
    return data, feedback.after(wanted, sent)
