"""Work W and depth D of layers, by kind, from their shapes, as in Ben-Nun & Hoefler (2019, parallelism in layer types).

The paper's table gives the orders of W and D; the formulas of this module count every operation. The argument `data`
says that the layer's inputs are the data, which need no gradient. Sums over the batch determine the depth of the
weights' gradients. A convolution computed as a matrix product (im2col) has the same W and D as a direct convolution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flockstep.costs.layers import NOTHING, Layer, Number, Pass, log2_ceil

NORMALIZE, NORMALIZE_WEIGHTS, NORMALIZE_INPUTS = 7, 3, 8
"""Number of operations per element of a normalization. Forward pass: mean 1, center 1, variance 2, divide 1, scale and
shift 2. Backward pass: 2 for ∇γ, 1 for ∇β, 8 for the gradient of the inputs.
"""
SOFTMAX, SOFTMAX_BACK = 4, 3
"""Number of operations per element of a softmax. Forward pass: maximum, exponential of the difference, sum, quotient.
Backward pass: product, sum, difference.
"""


def linear(name: str, c_in: int, c_out: int, rows: Number = 1, bias: bool = True, data: bool = False) -> Layer:
    """Return a fully connected layer with its costs: work W = N C_out C_in, depth D = ⌈log2 C_in⌉ in the forward pass.

    `rows` is the number of rows per sample, for example the tokens of a text.
    """
    products = rows * c_in * c_out
    return Layer(
        name,
        "linear",
        parameters=c_in * c_out + (c_out if bias else 0),
        forward=Pass(products, depth=log2_ceil(c_in)),
        by_weight=Pass(products, sums=1, summed=rows),
        by_input=NOTHING if data else Pass(products, depth=log2_ceil(c_out)),
        reads=rows * c_in,
        writes=rows * c_out,
    )


def convolution(
    name: str,
    c_in: int,
    c_out: int,
    shapes: tuple[Sequence[int], Sequence[int], Sequence[int]],
    groups: int = 1,
    bias: bool = True,
    data: bool = False,
    transposed: bool = False,
) -> Layer:
    """Return a convolution layer, direct or im2col, with its costs: work W = N C_out H' W' C_in K_y K_x, depth D =
    ⌈log2 C_in⌉ + ⌈log2 K_y⌉ + ⌈log2 K_x⌉ in the forward pass.

    `shapes` are those of the kernel, of the inputs (H, W) and of the outputs (H', W'), in any number of dimensions. A
    transposed convolution spreads each input over a window, so the inputs are counted instead of the outputs.
    """
    kernel, inputs, outputs = shapes
    weights = c_in * c_out // groups * math.prod(kernel)
    products = weights * math.prod(inputs if transposed else outputs)
    window = sum(log2_ceil(width) for width in kernel)
    return Layer(
        name,
        "convolution",
        parameters=weights + (c_out if bias else 0),
        forward=Pass(products, depth=log2_ceil(c_in // groups) + window),
        by_weight=Pass(products, sums=1, summed=math.prod(inputs if transposed else outputs)),
        by_input=NOTHING if data else Pass(products, depth=log2_ceil(c_out // groups) + window),
        reads=c_in * math.prod(inputs),
        writes=c_out * math.prod(outputs),
    )


def pooling(name: str, reads: Number, writes: Number, window: Sequence[int], data: bool = False) -> Layer:
    """Return a layer of maximum or mean pooling with its costs: work W = N C H' W' K_y K_x, depth D = ⌈log2 K_y⌉ +
    ⌈log2 K_x⌉.

    The backward pass has one operation per output.
    """
    return Layer(
        name,
        "pooling",
        forward=Pass(other=writes * math.prod(window), depth=sum(log2_ceil(width) for width in window)),
        by_input=NOTHING if data else Pass(other=writes, depth=1),
        reads=reads,
        writes=writes,
    )


def activation(name: str, elements: Number, data: bool = False, kind: str = "activation") -> Layer:
    """Return a layer of an elementwise activation with its costs: work W = N C H W and depth D = 1, both in the forward
    and in the backward pass.
    """
    return Layer(
        name,
        kind,
        forward=Pass(other=elements, depth=1),
        by_input=NOTHING if data else Pass(other=elements, depth=1),
        reads=elements,
        writes=elements,
    )


def total(name: str, elements: Number, terms: int = 2) -> Layer:
    """Return a layer that adds the outputs of `terms` branches, with its costs: work W = N C H W (terms - 1), depth D =
    ⌈log2 terms⌉. The gradient is passed on unchanged.
    """
    return Layer(
        name,
        "sum",
        forward=Pass(other=elements * (terms - 1), depth=log2_ceil(terms)),
        reads=terms * elements,
        writes=elements,
    )


def softmax(name: str, elements: Number, classes: int, data: bool = False) -> Layer:
    """Return a softmax layer over `classes` classes with its costs: a maximum and a sum, each of depth ⌈log2
    classes⌉.
    """
    depth = log2_ceil(classes)
    return Layer(
        name,
        "softmax",
        forward=Pass(other=SOFTMAX * elements, depth=2 * depth + 3),
        by_input=NOTHING if data else Pass(other=SOFTMAX_BACK * elements, depth=depth + 2),
        reads=elements,
        writes=elements,
    )


def batch_norm(name: str, channels: int, places: Number, affine: bool = True, data: bool = False) -> Layer:
    """Return a layer of batch normalization with its costs: work W of the order N C H W, depth D = ⌈log2 N H W⌉ for the
    mean, and again for the variance.

    `places` is H·W, the number of places per sample.
    """
    elements = channels * places
    return Layer(
        name,
        "norm",
        parameters=2 * channels if affine else 0,
        forward=Pass(other=NORMALIZE * elements, depth=5, sums=2, summed=places),
        by_weight=Pass(other=NORMALIZE_WEIGHTS * elements, depth=1, sums=1, summed=places) if affine else NOTHING,
        by_input=NOTHING if data else Pass(other=NORMALIZE_INPUTS * elements, depth=5, sums=1, summed=places),
        reads=elements,
        writes=elements,
    )


def group_norm(name: str, elements: Number, over: int, weights: int, biases: int = 0, data: bool = False) -> Layer:
    """Return a layer of normalization over `over` elements of one sample (layer, group or instance norm) with its
    costs: depth D = 2 ⌈log2 over⌉ in the forward pass.
    """
    depth = log2_ceil(over)
    each = elements / weights if weights else elements
    return Layer(
        name,
        "norm",
        parameters=weights + biases,
        forward=Pass(other=NORMALIZE * elements, depth=5 + 2 * depth),
        by_weight=Pass(other=NORMALIZE_WEIGHTS * elements, depth=1, sums=1, summed=each) if weights else NOTHING,
        by_input=NOTHING if data else Pass(other=NORMALIZE_INPUTS * elements, depth=5 + depth),
        reads=elements,
        writes=elements,
    )


def embedding(name: str, symbols: int, width: int, tokens: Number = 1) -> Layer:
    """Return an embedding layer with its costs: a lookup without arithmetic, whose backward pass adds the gradients of
    equal symbols.
    """
    return Layer(
        name,
        "embedding",
        parameters=symbols * width,
        by_weight=Pass(other=tokens * width, sums=1, summed=tokens),
        reads=tokens,
        writes=tokens * width,
    )


def attention(name: str, heads: int, queries: int, keys: int, head: int) -> Layer:
    """Return a layer of attention without its weights, softmax(q kᵀ) v (Vaswani et al. 2017), with its costs. `head` is
    the number of elements per head.
    """
    scores = heads * queries * keys
    over_keys = log2_ceil(keys)
    # backward: ∇v and ∇scores from the outputs, the softmax, then ∇q and ∇k side by side
    back = max(log2_ceil(queries), log2_ceil(head) + over_keys + 2 + max(over_keys, log2_ceil(queries)))
    return Layer(
        name,
        "attention",
        forward=Pass(scores * 2 * head, (SOFTMAX + 1) * scores, log2_ceil(head) + 4 + 3 * over_keys),
        by_input=Pass(2 * scores * 2 * head, (SOFTMAX_BACK + 1) * scores, back),
        reads=heads * (queries * head + 2 * keys * head),
        writes=heads * queries * head,
    )


def recurrent(
    name: str,
    c_in: int,
    hidden: int,
    steps: Number,
    gates: int = 1,
    biases: int = 2,
    data: bool = False,
) -> Layer:
    """Return a recurrent layer of `gates` gates (4 for LSTM, 3 for GRU, 1 for a plain cell) over a sequence of `steps`
    steps, with its costs.

    The depth D grows with `steps`, because the steps are sequential.

    Each step has a product with the inputs, which does not depend on earlier steps, a product with the hidden state,
    and about three further operations per gate and unit.
    """
    products = steps * gates * hidden * (c_in + hidden)
    other, cell = 3 * steps * gates * hidden, 3
    forward = log2_ceil(c_in) + math.ceil(steps) * (log2_ceil(hidden) + cell)
    backward = math.ceil(steps) * (log2_ceil(gates * hidden) + cell)
    # the state before the first step needs no gradient
    inputs = max(steps - 1, 0) * gates * hidden * hidden + (0 if data else steps * gates * hidden * c_in)
    return Layer(
        name,
        "recurrent",
        parameters=gates * hidden * (c_in + hidden + biases),
        forward=Pass(products, other, forward),
        by_weight=Pass(products, sums=1, summed=steps),
        by_input=Pass(inputs, other, backward),
        reads=steps * c_in,
        writes=steps * hidden,
    )
