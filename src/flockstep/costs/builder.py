"""A builder for the shapes of networks, each of whose methods adds a layer and returns the shape of the layer's
output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from flockstep.costs import formulas
from flockstep.costs.layers import NOTHING, Layer, ModelShape
from flockstep.errors import ConfigurationError


@dataclass(frozen=True)
class At:
    """Shape of a layer's output: `channels` maps of `size` × `size` elements per sample. `after` names the layers that
    compute the output.
    """

    channels: int
    size: int
    after: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        """Number of elements of the output per sample."""
        return self.channels * self.size**2


@dataclass
class Net:
    """A network under construction: its layers in the order in which they were added, each with the names of the layers
    whose outputs it reads.
    """

    layers: list[Layer] = field(default_factory=list)

    def add(self, layer: Layer, after: tuple[str, ...], channels: int, size: int = 1) -> At:
        """Append `layer` to the network. If the layer reads the output of no other layer, its inputs are the data,
        which need no gradient.
        """
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
        """Append a convolution with a square kernel."""
        size = _outputs(x.size, kernel, stride, pad)
        shapes = ((kernel, kernel), (x.size, x.size), (size, size))
        return self.add(
            formulas.convolution(name, x.channels, channels, shapes, groups=groups, bias=bias), x.after, channels, size
        )

    def pool(self, x: At, name: str, kernel: int, stride: int, pad: int = 0, ceil: bool = False) -> At:
        """Append a square maximum or mean pooling. With `ceil`, the size of the output is rounded up."""
        size = _outputs(x.size, kernel, stride, pad, ceil)
        layer = formulas.pooling(name, x.elements, x.channels * size**2, (kernel, kernel))
        return self.add(layer, x.after, x.channels, size)

    def relu(self, x: At, name: str) -> At:
        """Append a ReLU activation, which has no parameters."""
        return self.add(formulas.activation(name, x.elements), x.after, x.channels, x.size)

    def batch_norm(self, x: At, name: str) -> At:
        """Append a batch normalization with scale and shift."""
        return self.add(formulas.batch_norm(name, x.channels, x.size**2), x.after, x.channels, x.size)

    def linear(self, x: At, name: str, width: int) -> At:
        """Append a fully connected layer with biases, over all elements of a sample."""
        return self.add(formulas.linear(name, x.elements, width), x.after, width)

    def total(self, xs: Sequence[At], name: str) -> At:
        """Append a layer that adds the outputs of several branches."""
        after = tuple(one for x in xs for one in x.after)
        return self.add(formulas.total(name, xs[0].elements, len(xs)), after, xs[0].channels, xs[0].size)

    def shape(self, name: str, note: str) -> ModelShape:
        """Return the shape of the network that has been built."""
        return ModelShape(name, tuple(self.layers), note=note)


def in_parallel(xs: Sequence[At]) -> At:
    """Return the output of several branches whose channels are concatenated."""
    return At(sum(x.channels for x in xs), xs[0].size, tuple(one for x in xs for one in x.after))


def _outputs(size: int, kernel: int, stride: int, pad: int, ceil: bool = False) -> int:
    room = size + 2 * pad - kernel
    if room < 0:
        raise ConfigurationError(
            f"a window of {kernel} does not fit into {size} with padding {pad}; use larger images or a smaller window"
        )
    steps = -(-room // stride) if ceil else room // stride
    if ceil and steps * stride >= size + pad:  # the last window must begin inside the image
        steps -= 1
    return steps + 1
