"""Checks that an aggregation can be combined with the other components of a strategy."""

from __future__ import annotations

from flockstep.codecs.base import Codec
from flockstep.errors import CompositionError
from flockstep.strategies.aggregations.base import Aggregation


def check_slices(aggregation: Aggregation, codec: Codec, slices: int) -> None:
    """Check that an aggregation can combine vectors that are encoded with `codec` and divided into `slices` slices,
    each combined by a different owner.

    Raises:
        CompositionError: the aggregation cannot combine such vectors.
    """
    if slices != 1 and not aggregation.coordinatewise:
        raise CompositionError(
            f"{aggregation} compares whole gradients, but the servers of different slices would choose different "
            "workers; use ps(shards=1), or aggregation=median or trimmed_mean, which work on each element"
        )
    if codec.sparse and aggregation.coordinatewise and not aggregation.linear:
        raise CompositionError(
            f"{aggregation} would be 0 for most elements, because the codec sends only a few elements of each "
            f"gradient, got codec={codec}; use a dense codec such as half or int8, or an aggregation of whole "
            "gradients such as multi_krum"
        )
