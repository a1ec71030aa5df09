"""Locally connected layers on a grid of machines, and the number of activations that each machine fetches from its
neighbors.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from flockstep.arrays.schema import slices
from flockstep.errors import ConfigurationError
from flockstep.split.grid import HaloExchange


@dataclass(frozen=True)
class LocalLayer:
    """The shape of a convolution or of a locally connected layer, on a field of `height` × `width` places."""

    height: int
    width: int
    channels: int
    """Number of channels of the inputs."""
    window: int
    """Side length of the square window of inputs that one output reads."""
    stride: int = 1

    def __post_init__(self) -> None:
        for name in ("channels", "window", "stride"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} of a layer must be >= 1, got {getattr(self, name)}; give at least 1")
        if self.window > min(self.height, self.width):
            raise ConfigurationError(
                f"the window of a layer must be at most the {self.height} x {self.width} inputs, got {self.window}; "
                "use a smaller window"
            )

    @property
    def outputs(self) -> tuple[int, int]:
        """Height and width of the outputs, for inputs without padding."""
        return (self.height - self.window) // self.stride + 1, (self.width - self.window) // self.stride + 1

    def fetched(self, rows: int, columns: int) -> list[int]:
        """Return the numbers of input elements that the machines of a grid fetch for one sample (Coates et al. 2013,
        section 4).

        Inputs and outputs are divided into `rows` × `columns` rectangles, one for each machine. A machine fetches an
        element once, however many of its outputs read it, and returns the same number of gradients in the backward
        pass.

        Raises:
            ConfigurationError: there are more machines than outputs along an axis.
        """
        below, across = self.outputs
        if rows > below or columns > across:
            raise ConfigurationError(
                f"the {below} x {across} outputs of a layer cannot be divided into {rows} x {columns} rectangles; use "
                "a smaller grid"
            )
        vertical = self._needs(self.height, below, rows)
        horizontal = self._needs(self.width, across, columns)
        return [
            self.channels * (read * wide - own * narrow)
            for (read, own), (wide, narrow) in product(vertical, horizontal)
        ]

    def _needs(self, inputs: int, outputs: int, parts: int) -> list[tuple[int, int]]:
        """Along one axis: the number of places that each part reads, and how many of them it holds."""
        found = []
        for held, made in zip(slices(inputs, parts), slices(outputs, parts), strict=True):
            first, end = made.start * self.stride, (made.stop - 1) * self.stride + self.window
            found.append((end - first, max(0, min(end, held.stop) - max(first, held.start))))
        return found


def fetched_elements(exchange: HaloExchange, part: int) -> int:
    """Return the number of activations that worker `part` fetches for one sample."""
    return exchange.channels * sum(one.places for one in exchange.back.sent(part).values())
