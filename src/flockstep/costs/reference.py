"""Reference models: the shapes of networks that papers on distributed training use, and the builder that makes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from flockstep.costs import formulas
from flockstep.costs.layers import NOTHING, Layer, ModelShape
from flockstep.errors import ConfigurationError, UnknownName


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


def alexnet() -> ModelShape:
    """Return the shape of AlexNet (Krizhevsky, Sutskever & Hinton 2012): five convolutions and three fully connected
    layers, with 60,965,224 parameters and 724 M multiply-adds.
    """
    net = Net()
    x = net.relu(net.conv(At(3, 227), "conv1", 96, 11, stride=4), "relu1")
    x = net.pool(x, "pool1", 3, 2)
    x = net.relu(net.conv(x, "conv2", 256, 5, pad=2, groups=2), "relu2")
    x = net.pool(x, "pool2", 3, 2)
    x = net.relu(net.conv(x, "conv3", 384, 3, pad=1), "relu3")
    x = net.relu(net.conv(x, "conv4", 384, 3, pad=1, groups=2), "relu4")
    x = net.relu(net.conv(x, "conv5", 256, 3, pad=1, groups=2), "relu5")
    x = net.pool(x, "pool5", 3, 2)
    x = net.relu(net.linear(x, "fc6", 4096), "relu6")
    x = net.relu(net.linear(x, "fc7", 4096), "relu7")
    net.linear(x, "fc8", 1000)
    return net.shape(
        "alexnet",
        "with two towers (groups of filters) as published, for inputs of 227 × 227; local response normalization and "
        "dropout are left out",
    )


def vgg_a() -> ModelShape:
    """Return the shape of VGG-A (Simonyan & Zisserman 2014, table 1): eight convolutions and three fully connected
    layers, with 132,863,336 parameters and 7.6 G multiply-adds.
    """
    net, x = Net(), At(3, 224)
    for stage, widths in enumerate(((64,), (128,), (256, 256), (512, 512), (512, 512)), 1):
        for place, channels in enumerate(widths, 1):
            x = net.conv(x, f"conv{stage}_{place}", channels, 3, pad=1)
            x = net.relu(x, f"relu{stage}_{place}")
        x = net.pool(x, f"pool{stage}", 2, 2)
    for place in (6, 7):
        x = net.relu(net.linear(x, f"fc{place}", 4096), f"relu{place}")
    net.linear(x, "fc8", 1000)
    return net.shape("vgg-a", "configuration A with 11 weight layers, for inputs of 224 × 224; dropout is left out")


INCEPTIONS = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
"""Inception block → numbers of channels of its convolutions: 1 × 1; 3 × 3 reduce and 3 × 3; 5 × 5 reduce and 5 × 5; 1 ×
1 after the pooling.
"""


def googlenet() -> ModelShape:
    """Return the shape of GoogLeNet (Szegedy et al. 2014, table 1): three convolutions, nine inception blocks and a
    fully connected layer, with 6,998,552 parameters and 1.6 G multiply-adds.
    """
    net = Net()
    x = net.relu(net.conv(At(3, 224), "conv1", 64, 7, 2, 3), "relu1")
    x = net.pool(x, "pool1", 3, 2, ceil=True)
    x = net.relu(net.conv(x, "conv2.reduce", 64, 1), "relu2.reduce")
    x = net.relu(net.conv(x, "conv2", 192, 3, pad=1), "relu2")
    x = net.pool(x, "pool2", 3, 2, ceil=True)
    for name, widths in INCEPTIONS.items():
        if name in ("4a", "5a"):
            x = net.pool(x, f"pool{int(name[0]) - 1}", 3, 2, ceil=True)
        x = _inception(net, x, name, widths)
    net.linear(net.pool(x, "average", 7, 1), "fc", 1000)
    return net.shape(
        "googlenet",
        "the published network for inputs of 224 × 224, with biases, without its two auxiliary classifiers and without "
        "batch normalization; local response normalization and dropout are left out; often quoted as 6.8 M parameters",
    )


def _inception(net: Net, x: At, name: str, widths: tuple[int, ...]) -> At:
    one, three_reduced, three, five_reduced, five, pooled = widths

    def conv(y: At, what: str, channels: int, kernel: int = 1) -> At:
        return net.relu(net.conv(y, f"{name}.{what}", channels, kernel, pad=kernel // 2), f"{name}.relu.{what}")

    return in_parallel(
        [
            conv(x, "1x1", one),
            conv(conv(x, "3x3.reduce", three_reduced), "3x3", three, 3),
            conv(conv(x, "5x5.reduce", five_reduced), "5x5", five, 5),
            conv(net.pool(x, f"{name}.pool", 3, 1, 1), "pool.project", pooled),
        ]
    )


def resnet(name: str, blocks: Sequence[int], as_published: bool = False) -> ModelShape:
    """Return the shape of a residual network of bottleneck blocks (He, Zhang, Ren & Sun 2015, table 1) on inputs of
    224 × 224: ResNet-50 has (3, 4, 6, 3) blocks and ResNet-152 (3, 8, 36, 3).

    A block that halves the maps has the stride in its 3 × 3 convolution, as is common today. In the paper
    (`as_published`), the first 1 × 1 convolution has the stride, which needs fewer operations and the same parameters.
    """
    net = Net()
    x = net.relu(net.batch_norm(net.conv(At(3, 224), "conv1", 64, 7, 2, 3, bias=False), "bn1"), "relu1")
    x = net.pool(x, "pool1", 3, 2, 1)
    for stage, count in enumerate(blocks):
        for place in range(count):
            stride = 2 if stage and not place else 1
            x = _bottleneck(net, x, f"{stage + 2}.{place + 1}", 64 << stage, stride, as_published)
    net.linear(net.pool(x, "average", x.size, x.size), "fc", 1000)
    halving = "first 1 × 1 convolution of a block, as published" if as_published else "3 × 3 convolution of a block"
    return net.shape(name, f"for inputs of 224 × 224; a block that halves the resolution does so in the {halving}")


def _bottleneck(net: Net, x: At, name: str, width: int, stride: int, first: bool) -> At:
    """A bottleneck block: 1 × 1 down, 3 × 3, 1 × 1 up to 4 × width, added to the input or its projection."""
    strides = (stride, 1) if first else (1, stride)
    y = net.conv(x, f"{name}.conv1", width, 1, strides[0], bias=False)
    y = net.relu(net.batch_norm(y, f"{name}.bn1"), f"{name}.relu1")
    y = net.conv(y, f"{name}.conv2", width, 3, strides[1], 1, bias=False)
    y = net.relu(net.batch_norm(y, f"{name}.bn2"), f"{name}.relu2")
    y = net.batch_norm(net.conv(y, f"{name}.conv3", 4 * width, 1, bias=False), f"{name}.bn3")
    if x.channels != y.channels:
        x = net.batch_norm(net.conv(x, f"{name}.project", 4 * width, 1, stride, bias=False), f"{name}.bn4")
    return net.relu(net.total([y, x], f"{name}.add"), f"{name}.relu3")


def gpt(
    name: str, layers: int = 12, width: int = 768, heads: int = 12, context: int = 1024, symbols: int = 50257
) -> ModelShape:
    """Return the shape of a decoder-only transformer on samples of `context` tokens, by default of GPT-2 small (Radford
    et al. 2019, table 2). The output layer shares the embedding's weights, without biases.

    Attention is counted over all pairs of tokens, including masked pairs, as dense kernels compute attention.
    """
    stream = context * width
    made: list[Layer] = [
        formulas.embedding("tokens", symbols, width, context),
        dataclasses.replace(formulas.embedding("positions", context, width, context), after=()),
        dataclasses.replace(formulas.total("embed", stream), after=("tokens", "positions")),
    ]
    for index in range(layers):
        made += _decoder_block(str(index), made[-1].name, width, heads, context)
    made.append(formulas.group_norm("norm", stream, width, width, width))
    head = formulas.linear("head", width, symbols, context, bias=False)
    made.append(dataclasses.replace(head, parameters=0, tied="tokens"))
    note = f"{context:,} tokens per sample; input and output embedding share their weights; dropout is left out"
    return ModelShape(name, tuple(made), note=note)


def _decoder_block(name: str, before: str, width: int, heads: int, context: int) -> list[Layer]:
    """Attention and a perceptron, each with normalization before it and a residual connection."""
    stream = context * width
    return [
        formulas.group_norm(f"{name}.norm1", stream, width, width, width),
        formulas.linear(f"{name}.qkv", width, 3 * width, context),
        formulas.attention(f"{name}.attention", heads, context, context, width // heads),
        formulas.linear(f"{name}.project", width, width, context),
        dataclasses.replace(formulas.total(f"{name}.add1", stream), after=(f"{name}.project", before)),
        formulas.group_norm(f"{name}.norm2", stream, width, width, width),
        formulas.linear(f"{name}.up", width, 4 * width, context),
        formulas.activation(f"{name}.gelu", 4 * stream),
        formulas.linear(f"{name}.down", 4 * width, width, context),
        dataclasses.replace(formulas.total(f"{name}.add2", stream), after=(f"{name}.down", f"{name}.add1")),
    ]


@dataclass(frozen=True)
class Reference:
    """A reference model with its published numbers of parameters and of multiply-adds of one forward pass."""

    build: Callable[[], ModelShape]
    parameters: float
    multiply_adds: float
    source: str


MODELS = {
    "alexnet": Reference(alexnet, 61e6, 0.72e9, "Krizhevsky et al. 2012: 60 million parameters"),
    "vgg-a": Reference(vgg_a, 132.9e6, 7.6e9, "Simonyan & Zisserman 2014, table 2: 133 million parameters"),
    "googlenet": Reference(googlenet, 6.8e6, 1.5e9, "Szegedy et al. 2014, quoted as 6.8 million parameters"),
    "resnet-50": Reference(
        partial(resnet, "resnet-50", (3, 4, 6, 3)),
        25.6e6,
        4.1e9,
        "He et al. 2015, table 1: 3.8e9 multiply-adds, with the resolution halved as published",
    ),
    "resnet-152": Reference(
        partial(resnet, "resnet-152", (3, 8, 36, 3)),
        60.2e6,
        11.5e9,
        "He et al. 2015, table 1: 11.3e9 multiply-adds, with the resolution halved as published",
    ),
    "gpt-2-small": Reference(
        partial(gpt, "gpt-2-small"), 124e6, 145.8e9, "Radford et al. 2019: 124 million parameters as released"
    ),
}
"""The reference models of the literature: name → network."""


def reference(name: str) -> ModelShape:
    """Return the shape of the reference model called `name`.

    Raises:
        UnknownName: there is no such model.
    """
    if name not in MODELS:
        raise UnknownName.among("reference model", name, MODELS)
    return MODELS[name].build()
