"""Checks of arguments that several functions of `flockstep.experiments` have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from flockstep.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

    from flockstep.costs.cluster import ClusterShape

T = TypeVar("T")


def listed(name: str, values: Sequence[T]) -> tuple[T, ...]:
    """Return the values of an argument that is a list.

    A string is refused, because Python would iterate over its letters.

    Raises:
        ConfigurationError: `values` is a string.
    """
    if isinstance(values, str):
        raise ConfigurationError(f"{name} must be a list, got {values!r}; write [{values!r}]")
    return tuple(values)


def usual(given: T | None, default: T | None) -> T | None:
    """Return the value that was given for an argument, or the default if no value was given (None)."""
    return default if given is None else given


def cluster_of(
    cluster: str | Path | None, network: str | None, compute: str | None, imports: Sequence[str]
) -> ClusterShape | None:
    """Return the cluster whose links and times a simulation uses; None if the argument names no cluster.

    Raises:
        ConfigurationError: there is no such cluster, or a network or a compute model is given in addition.
    """
    if cluster is None:
        return None
    from flockstep.costs.cluster_reading import load_cluster
    from flockstep.frameworks.job import import_components

    for name, value in (("network", network), ("compute", compute)):
        if value is not None:
            raise ConfigurationError(
                f"{name} {value} and cluster {cluster} both describe the cluster; give only one of them"
            )
    import_components(imports)
    return load_cluster(cluster)
