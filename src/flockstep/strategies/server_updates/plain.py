"""The plain server update: the job's optimizer takes a step along the mean of the released gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from flockstep.nodes import Server
from flockstep.strategies.aggregations.base import Combine
from flockstep.strategies.aggregations.mean import mean_of
from flockstep.strategies.consistency import Push
from flockstep.strategies.server_updates.base import ServerUpdate, equal_weights, rate_of


@dataclass(frozen=True)
class Plain(ServerUpdate):
    """One step of the job's optimizer along the mean of the released gradients."""

    clips: ClassVar[Literal["combined", "none"]] = "combined"

    def apply(
        self, me: Server, state: Any, group: Sequence[Push], share: float = 1.0, combine: Combine = mean_of
    ) -> list[float]:
        me.update(combine([push.gradient for push in group]), rate_of(group), share)
        return equal_weights(group, share)
