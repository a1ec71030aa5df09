"""Deep gradient compression: sends the largest elements, found by sampling, and raises the sparsity during a
warm-up.
"""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.codecs.base import Codec
from flockstep.codecs.identity import Identity
from flockstep.codecs.top import Largest, check_ratio
from flockstep.errors import ConfigurationError

STAGES = 4
"""Number of warm-up ratios before the final ratio: 25 %, 6.25 %, 1.5625 % and 0.4 %, as published."""


@dataclass(frozen=True)
class Dgc(Largest):
    """Deep gradient compression (Lin et al. 2018, section 3): the `ratio`·d largest elements, found by sampling.

    `warmup` is a number of steps: in its four quarters 25 %, 6.25 %, 1.5625 % and 0.4 % of the elements are sent
    (section 3.3: a sparsity of 75, 93.75, 98.4375 and 99.6 %), never fewer than `ratio`. For momentum correction and
    masking use the feedback `momentum`; to send tensors of one dimension uncompressed use `by_size(dgc)`.
    """

    ratio: float = 0.001
    warmup: int = 0
    values: Codec = Identity()
    sampled = True

    def __post_init__(self) -> None:
        check_ratio("dgc", self.ratio)
        if self.warmup < 0:
            raise ConfigurationError(f"dgc needs a warmup >= 0 steps, got {self.warmup}; use 0 for no warm-up")

    def bind_step(self, step: int) -> Codec:
        """Return the codec with the ratio that belongs to the given step."""
        warm = self._with(values=self.values.bind_step(step), warmup=0)
        if step >= self.warmup:
            return warm
        stage = STAGES * step // self.warmup
        published = 0.004 if stage == STAGES - 1 else 0.25 ** (stage + 1)
        return warm._with(ratio=max(self.ratio, published))
