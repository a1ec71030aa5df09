"""The kinds of torch modules whose work and depth follow from their shape, each with its formula."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import activation as activations
from torch.nn.modules import dropout, padding

from flockstep.costs import formulas
from flockstep.costs.layers import NOTHING, Layer, Number, Pass, log2_ceil


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """One call of a leaf module for `batch` samples. `data`: no input has a gradient."""

    name: str
    module: Any
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    batch: int
    data: bool

    @property
    def x(self) -> torch.Tensor:
        """The first input of the module."""
        return self.inputs[0]

    @property
    def y(self) -> torch.Tensor:
        """The first output of the module."""
        return self.outputs[0]

    def each(self, count: int) -> Number:
        """Return the count per sample: `count` divided by the number of samples."""
        return count // self.batch if count % self.batch == 0 else count / self.batch

    @property
    def reads(self) -> Number:
        """Number of elements of all inputs of the call, per sample."""
        return self.each(sum(one.numel() for one in self.inputs))

    @property
    def writes(self) -> Number:
        """Number of elements of all outputs of the call, per sample."""
        return self.each(sum(one.numel() for one in self.outputs))


Formula = Callable[[ModuleCall], Layer | None]


def layer_of(call: ModuleCall) -> Layer | None:
    """Return the layer, with its work and depth, for a call of a module; None if the module's kind has no formula."""
    formula = _formula(call.module)
    return None if formula is None or not call.inputs or not call.outputs else formula(call)


def is_known(module: nn.Module) -> bool:
    """Return whether there is a formula for the module and for every module inside it."""
    return _formula(module) is not None


def register_kind(kind: type[nn.Module], formula: Formula | None = None) -> None:
    """Register `formula` for a custom module class. None stands for one operation per element, as in an activation."""
    _KINDS[kind] = _activation if formula is None else formula


def _formula(module: nn.Module) -> Formula | None:
    """Return the formula of the module's kind, unless the module's class overrides the kind's computation."""
    for kind, formula in _KINDS.items():
        if isinstance(module, kind) and type(module).forward is kind.forward:
            return formula
    return None


def _linear(call: ModuleCall) -> Layer:
    rows = call.each(call.x.numel() // call.module.in_features)
    return formulas.linear(call.name, call.module.in_features, call.module.out_features, rows, data=call.data)


def _convolution(call: ModuleCall) -> Layer:
    m: Any = call.module
    dims = len(m.kernel_size)
    inputs, outputs = call.x.shape[-dims:], call.y.shape[-dims:]
    layer = formulas.convolution(
        call.name,
        m.in_channels,
        m.out_channels,
        (m.kernel_size, inputs, outputs),
        m.groups,
        data=call.data,
        transposed=m.transposed,
    )
    return _times(layer, call.each(call.x.numel() // (m.in_channels * math.prod(inputs))))


def _pooling(call: ModuleCall, dims: int) -> Layer:
    size: Any = getattr(call.module, "kernel_size", None)
    if isinstance(size, int):
        window: Sequence[int] = (size,) * dims
    elif size is not None:
        window = tuple(size)
    else:  # adaptive: the widest window
        window = [-(-a // b) for a, b in zip(call.x.shape[-dims:], call.y.shape[-dims:], strict=True)]
    return formulas.pooling(call.name, call.reads, call.each(call.y.numel()), window, call.data)


def _activation(call: ModuleCall) -> Layer:
    layer = formulas.activation(call.name, call.reads, call.data)
    layer = dataclasses.replace(layer, writes=call.writes)
    if not _weighed(call):
        return layer
    return dataclasses.replace(layer, by_weight=Pass(other=call.reads, sums=1, summed=call.reads))


def _dropout(call: ModuleCall) -> Layer:
    return formulas.activation(call.name, call.reads, call.data, "dropout") if call.module.training else _reshape(call)


def _reshape(call: ModuleCall) -> Layer:
    return Layer(call.name, "reshape", reads=call.reads, writes=call.writes)


def _softmax(call: ModuleCall) -> Layer:
    dim = getattr(call.module, "dim", None)
    return formulas.softmax(call.name, call.reads, call.x.shape[-1 if dim is None else dim], call.data)


def _batch_norm(call: ModuleCall) -> Layer:
    channels = call.module.num_features
    return formulas.batch_norm(
        call.name, channels, call.each(call.x.numel() // channels), call.module.affine, call.data
    )


def _instance_norm(call: ModuleCall, dims: int) -> Layer:
    over = math.prod(call.x.shape[-dims:])
    weights = call.module.num_features if call.module.affine else 0
    return formulas.group_norm(call.name, call.reads, over, weights, data=call.data)


def _layer_norm(call: ModuleCall) -> Layer:
    over = math.prod(call.module.normalized_shape)
    return formulas.group_norm(call.name, call.reads, over, over if _weighed(call) else 0, data=call.data)


def _group_norm(call: ModuleCall) -> Layer:
    m = call.module
    over = math.prod(call.x.shape[1:]) // m.num_groups
    return formulas.group_norm(call.name, call.reads, over, m.num_channels if m.affine else 0, data=call.data)


def _weighed(call: ModuleCall) -> bool:
    return next(call.module.parameters(), None) is not None


def _embedding(call: ModuleCall) -> Layer:
    m = call.module
    return formulas.embedding(call.name, m.num_embeddings, m.embedding_dim, call.each(call.x.numel()))


def _attention(call: ModuleCall) -> Layer | None:
    """Return the projections of queries, keys and values, the attention, and the output projection as one layer."""
    m = call.module
    if len(call.inputs) < 3:
        return None
    query, key, value = call.inputs[:3]
    along = 0 if query.dim() == 3 and not m.batch_first else -2
    queries, keys, width = query.shape[along], key.shape[along], m.embed_dim
    times = call.each(query.numel() // (queries * width))
    parts = [
        formulas.linear(call.name, width, width, queries, data=call.data),
        formulas.linear(call.name, key.shape[-1], width, keys, data=call.data),
        formulas.linear(call.name, value.shape[-1], width, keys, data=call.data),
        formulas.attention(call.name, m.num_heads, queries, keys, width // m.num_heads),
        formulas.linear(call.name, width, width, queries),
    ]
    return _times(_together(call, "attention", parts, [0, 3, 4]), times)


def _recurrent(call: ModuleCall) -> Layer | None:
    """Return the stacked layers as one layer, with the directions of each in parallel."""
    m = call.module
    if m.proj_size:
        return None
    steps = call.each(call.x.numel() // m.input_size)
    ways, gates = 2 if m.bidirectional else 1, m.weight_hh_l0.shape[0] // m.hidden_size
    parts = [
        formulas.recurrent(call.name, width, m.hidden_size, steps, gates, data=call.data and not depth)
        for depth, width in enumerate([m.input_size] + [ways * m.hidden_size] * (m.num_layers - 1))
        for _ in range(ways)
    ]
    return _together(call, "recurrent", parts, range(0, len(parts), ways))


def _cell(call: ModuleCall) -> Layer:
    m = call.module
    steps, gates = call.each(call.x.numel() // m.input_size), m.weight_hh.shape[0] // m.hidden_size
    return formulas.recurrent(call.name, m.input_size, m.hidden_size, steps, gates, data=call.data)


def _together(call: ModuleCall, kind: str, parts: Sequence[Layer], chained: Sequence[int]) -> Layer:
    """Return `parts` as one layer; the parts at the indices `chained` run one after another."""

    def joined(passes: Sequence[Pass]) -> Pass:
        return Pass(
            sum(one.products for one in passes),
            sum(one.other for one in passes),
            sum(passes[place].depth for place in chained),
            max(one.sums for one in passes),
            max(one.summed for one in passes),
        )

    return Layer(
        call.name,
        kind,
        forward=joined([part.forward for part in parts]),
        by_weight=joined([part.by_weight for part in parts]),
        by_input=joined([part.by_input for part in parts]),
        reads=call.reads,
        writes=call.writes,
    )


def _times(layer: Layer, times: Number) -> Layer:
    """Return `layer` for samples that go through it `times` times."""

    def more(one: Pass) -> Pass:
        return dataclasses.replace(
            one, products=one.products * times, other=one.other * times, summed=one.summed * times
        )

    if times == 1:
        return layer
    return dataclasses.replace(
        layer,
        forward=more(layer.forward),
        by_weight=more(layer.by_weight),
        by_input=more(layer.by_input),
        reads=layer.reads * times,
        writes=layer.writes * times,
    )


def unknown(call: ModuleCall, flops: int, weighed: bool) -> Layer:
    """Return the layer for a call of a module without a formula, with the number of products that torch counts, or
    without work if torch counts none.

    Each product is assumed to have two gradients: of weights and inputs if `weighed`, otherwise of two inputs. The
    depth is that of a sum over the products per output, which is exact for a single matrix product.
    """
    products = call.each(flops // 2)
    depth = log2_ceil(products / call.writes) if call.writes else 0
    return Layer(
        call.name,
        type(call.module).__name__,
        forward=Pass(products, depth=depth),
        by_weight=Pass(products, sums=1) if weighed else NOTHING,
        by_input=NOTHING if call.data else Pass(products if weighed else 2 * products, depth=depth),
        reads=call.reads,
        writes=call.writes,
        counted="torch" if flops else "unknown",
    )


def _classes(module: ModuleType) -> list[Any]:
    """Return the public classes of one of torch's modules of layers."""
    return [getattr(module, name) for name in module.__all__]


_SPECIAL = (nn.MultiheadAttention, nn.Softmax, nn.Softmin, nn.LogSoftmax, nn.Softmax2d)
_KINDS: dict[Any, Formula] = {
    nn.Linear: _linear,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _convolution),
    **{
        kind: partial(_pooling, dims=dims)
        for dims, kinds in (
            (1, (nn.MaxPool1d, nn.AvgPool1d, nn.LPPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d)),
            (2, (nn.MaxPool2d, nn.AvgPool2d, nn.LPPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)),
            (3, (nn.MaxPool3d, nn.AvgPool3d, nn.LPPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d)),
        )
        for kind in kinds
    },
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _batch_norm),
    nn.InstanceNorm1d: partial(_instance_norm, dims=1),
    nn.InstanceNorm2d: partial(_instance_norm, dims=2),
    nn.InstanceNorm3d: partial(_instance_norm, dims=3),
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), _layer_norm),
    nn.GroupNorm: _group_norm,
    nn.Embedding: _embedding,
    nn.MultiheadAttention: _attention,
    **dict.fromkeys((nn.RNN, nn.LSTM, nn.GRU), _recurrent),
    **dict.fromkeys((nn.RNNCell, nn.LSTMCell, nn.GRUCell), _cell),
    **dict.fromkeys((nn.Softmax, nn.Softmin, nn.LogSoftmax), _softmax),
    **dict.fromkeys(_classes(dropout), _dropout),
    **dict.fromkeys((nn.Identity, nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle), _reshape),
    **dict.fromkeys(_classes(padding), _reshape),
    **{kind: _activation for kind in _classes(activations) if kind not in _SPECIAL},
}
"""Class → formula; a class derived from one of these must compute the same."""
