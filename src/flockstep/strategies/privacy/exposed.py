"""No privacy: changes enter the model as they are."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.arrays.schema import FlatArray
from flockstep.nodes import Server
from flockstep.strategies.privacy.base import Privacy


@dataclass(frozen=True)
class Exposed(Privacy):
    """No bound: the model may tell of each client whatever its change tells."""

    def limited(self, change: FlatArray) -> FlatArray:
        return change

    def released(self, me: Server, mean: FlatArray, weight: float) -> FlatArray:
        return mean
