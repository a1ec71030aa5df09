"""Short descriptions of networks: functions that add layers and hand on where the data stand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from flockstep.costs import formulas
from flockstep.costs.layers import NOTHING, Layer, ModelShape
from flockstep.errors import ConfigurationError


@dataclass(frozen=True)
class At:
    """Where the data stand: `channels` maps of `size` × `size` per sample, made by the layers `after`."""

    channels: int
    size: int
    after: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        """Elements per sample."""
        return self.channels * self.size**2


@dataclass
class Net:
    """Layers, in the order they are added; each is wired to what it reads."""

    layers: list[Layer] = field(default_factory=list)

    def add(self, layer: Layer, after: tuple[str, ...], channels: int, size: int = 1) -> At:
        """Append `layer`; with nothing before it its inputs are data, which need no gradient."""
        wired = dataclasses.replace(layer, after=after)
        self.layers.append(wired if after else dataclasses.replace(wired, by_input=NOTHING))
        return At(channels, size, (layer.name,))

    def conv(
        self,
        x: At,
        name: str,
        channels: int,
        kernel: int,
        stride: int = 1,
        pad: int = 0,
        groups: int = 1,
        bias: bool = True,
    ) -> At:
        """A square convolution."""
        size = _outputs(x.size, kernel, stride, pad)
        shapes = ((kernel, kernel), (x.size, x.size), (size, size))
        return self.add(
            formulas.convolution(name, x.channels, channels, *shapes, groups=groups, bias=bias), x.after, channels, size
        )

    def pool(self, x: At, name: str, kernel: int, stride: int, pad: int = 0, ceil: bool = False) -> At:
        """A square maximum or mean; `ceil` rounds the size of the output up."""
        size = _outputs(x.size, kernel, stride, pad, ceil)
        layer = formulas.pooling(name, x.elements, x.channels * size**2, (kernel, kernel))
        return self.add(layer, x.after, x.channels, size)

    def relu(self, x: At, name: str) -> At:
        """An activation."""
        return self.add(formulas.activation(name, x.elements), x.after, x.channels, x.size)

    def batch_norm(self, x: At, name: str) -> At:
        """Batch normalisation, with scale and shift."""
        return self.add(formulas.batch_norm(name, x.channels, x.size**2), x.after, x.channels, x.size)

    def linear(self, x: At, name: str, width: int) -> At:
        """A fully connected layer over everything, with biases."""
        return self.add(formulas.linear(name, x.elements, width), x.after, width)

    def total(self, xs: Sequence[At], name: str) -> At:
        """The sum of branches."""
        after = tuple(one for x in xs for one in x.after)
        return self.add(formulas.total(name, xs[0].elements, len(xs)), after, xs[0].channels, xs[0].size)

    def shape(self, name: str, note: str) -> ModelShape:
        """What was built."""
        return ModelShape(name, tuple(self.layers), note=note)


def beside(xs: Sequence[At]) -> At:
    """The channels of branches one after the other."""
    return At(sum(x.channels for x in xs), xs[0].size, tuple(one for x in xs for one in x.after))


def _outputs(size: int, kernel: int, stride: int, pad: int, ceil: bool = False) -> int:
    room = size + 2 * pad - kernel
    if room < 0:
        raise ConfigurationError(
            f"a window of {kernel} does not fit into {size} with padding {pad}; give larger images or a smaller window"
        )
    steps = -(-room // stride) if ceil else room // stride
    if ceil and steps * stride >= size + pad:  # the last window must begin inside the image
        steps -= 1
    return steps + 1
