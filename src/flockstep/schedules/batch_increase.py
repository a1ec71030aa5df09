"""A schedule that increases the batch size instead of reducing the learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.errors import ConfigurationError
from flockstep.schedules.base import Extent, Schedule, check_positive, check_shares


@dataclass(frozen=True)
class BatchIncrease(Schedule):
    """A growing batch (Smith et al. 2018, section 4): `growth` times the batch where step decay divides the rate.

    Both divide the noise of SGD, about lr × samples / (batch (1 - momentum)), by the same factor and use the same
    number of samples; a larger batch makes fewer updates. The batch grows only at the first `increases` of the
    fractions `at` (None: at all of them); at the other fractions, the learning rate falls, for batches that cannot grow
    further (section 5.1). `scale` multiplies the learning rate throughout.
    """

    growth: float = 5.0
    at: tuple[float, ...] = (0.3, 0.6, 0.8)
    increases: int | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_positive("batch_increase", growth=self.growth, scale=self.scale)
        check_shares(self.at, "batch_increase")
        if self.increases is not None and not 0 <= self.increases <= len(self.at):
            raise ConfigurationError(
                f"`increases` of batch_increase must be in [0, {len(self.at)}], at most one for each fraction in `at`, "
                f"got {self.increases}; leave out `increases` to increase the batch at every fraction"
            )

    def factor(self, epoch: float, run: Extent) -> float:
        """Return the factor on the learning rate: scale / growth^(number of fractions reached after the last
        increase).
        """
        falls = () if self.increases is None else self.at[self.increases :]
        return self.scale / self.growth ** sum(run.reached(share, epoch) for share in falls)

    @property
    def stages(self) -> tuple[tuple[float, float], ...]:
        """Return the stages: from the i-th fraction on, the factor on the batch size is growth^i."""
        shares = (0.0, *self.at[: self.increases])
        return tuple((share, self.growth**i) for i, share in enumerate(shares))
