"""Forms of strategies, one file per family; importing one adds its forms."""

from __future__ import annotations

from types import ModuleType

from flockstep.costs.families import (
    coding,
    collective,
    elastic,
    hierarchical,
    local,
    neighbours,
    peers,
    servers,
    slices,
)

ALL: tuple[ModuleType, ...] = (collective, slices, servers, local, elastic, hierarchical, neighbours, peers, coding)
"""The files."""
