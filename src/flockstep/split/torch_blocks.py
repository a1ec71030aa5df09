"""Divides a torch module into blocks for tensor parallelism. A block consists of layers that every way computes,
followed by layers that are split over the ways (the workers of a stage).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 -- what every user of torch calls it
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from flockstep.arrays.schema import slices
from flockstep.costs.layers import Layer, ModelShape
from flockstep.errors import ConfigurationError
from flockstep.frameworks.torch_call import called
from flockstep.split.torch_chain import ChainLayer, layers_within
from flockstep.split.torch_trace import is_elementwise, writes_inputs

Tensors = Mapping[int, torch.Tensor]
"""Identity of a parameter or buffer of the module → tensor to use in its place."""


Places = npt.NDArray[np.int64]
"""Indices of elements of a parameter, in the shape of the tensor that the elements form on one way."""
Weights = Mapping[str, torch.Tensor]
ELEMENTWISE = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh,
    nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Threshold,
    nn.Tanhshrink, nn.Softshrink, nn.Hardshrink, nn.Dropout,
)  # fmt: skip
"""Layers without parameters that treat every element alike, so that a way applies them to its own features."""


class SplitLayers(ABC):
    """The interface of consecutive layers split over ways, whose output is the sum of the terms of all ways."""

    def __init__(self, layers: Sequence[str], parameters: Mapping[str, torch.Tensor], units: int, ways: int):
        """`layers`: names in the model; `parameters`: those that are split, by their role here; `units`: number of
        features, heads or words that are divided among the ways.
        """
        self.layers, self.parameters = layers, parameters
        self.spans = slices(units, ways)
        """The units of each way."""

    def share(self, way: int) -> float:
        """Return the share of the units (features, heads or words) that a way has."""
        span, units = self.spans[way], int(self.spans[-1].stop)
        return int(span.stop - span.start) / units

    def spans_of(self, role: str, way: int) -> tuple[int, Sequence[slice]]:
        """Return the axis along which the parameter `role` is divided, and the spans of this axis that a way holds."""
        return 0, [self.spans[way]]

    def shape(self, role: str, way: int) -> tuple[int, ...]:
        """Return the shape of the part of the parameter `role` that a way holds."""
        axis, spans = self.spans_of(role, way)
        found = list(self.parameters[role].shape)
        found[axis] = sum(span.stop - span.start for span in spans)
        return tuple(found)

    def places(self, role: str, way: int) -> Places:
        """Return the indices of the elements of the parameter `role` that a way holds."""
        axis, spans = self.spans_of(role, way)
        numbers = numbered(self.parameters[role])
        return np.concatenate([numbers[:, span] if axis else numbers[span] for span in spans], axis)

    @abstractmethod
    def term(self, way: int, x: torch.Tensor, weights: Weights, targets: torch.Tensor) -> torch.Tensor:
        """Return the term that one way (one worker of a stage) adds to the output, for inputs `x`, equal on all ways,
        the way's part of each parameter by role, and the targets of the batch.
        """


def numbered(parameter: torch.Tensor) -> Places:
    """Return the indices of the elements of a parameter, in the parameter's shape."""
    return np.arange(parameter.numel()).reshape(tuple(parameter.shape))


def _present(**parameters: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The parameters that a module has, by role."""
    return {role: one for role, one in parameters.items() if one is not None}


class ColumnAndRow(SplitLayers):
    """Two fully connected layers split over ways, the first by its outputs, the second by its inputs.

    The bias of the second layer is not part of a term, but is added to the sum of the terms.
    """

    def __init__(
        self,
        layers: Sequence[str],
        first: nn.Linear,
        between: Sequence[Callable[[torch.Tensor], torch.Tensor]],
        second: nn.Linear,
        ways: int,
    ):
        """`between`: elementwise functions of the outputs of the first layer."""
        parameters = _present(first=first.weight, bias=first.bias, second=second.weight)
        super().__init__(layers, parameters, first.out_features, ways)
        self._between = between

    def spans_of(self, role: str, way: int) -> tuple[int, Sequence[slice]]:
        return int(role == "second"), [self.spans[way]]

    def term(self, way: int, x: torch.Tensor, weights: Weights, targets: torch.Tensor) -> torch.Tensor:
        hidden = F.linear(x, weights["first"], weights.get("bias"))
        for function in self._between:
            hidden = function(hidden)
        return F.linear(hidden, weights["second"])


class Heads(SplitLayers):
    """Self-attention split by heads; the bias of the output is added to the sum of the terms."""

    def __init__(self, name: str, module: nn.MultiheadAttention, ways: int):
        parameters = _present(mix=module.in_proj_weight, bias=module.in_proj_bias, out=module.out_proj.weight)
        super().__init__((name,), parameters, module.num_heads, ways)
        self._module = module

    def spans_of(self, role: str, way: int) -> tuple[int, Sequence[slice]]:
        span, width = self.spans[way], self._module.head_dim
        features, size = slice(span.start * width, span.stop * width), self._module.embed_dim
        if role == "out":
            return 1, [features]
        return 0, [slice(start + features.start, start + features.stop) for start in (0, size, 2 * size)]

    def term(self, way: int, x: torch.Tensor, weights: Weights, targets: torch.Tensor) -> torch.Tensor:
        samples, length, _ = x.shape
        width, share = self._module.head_dim, self._module.dropout
        mixed = F.linear(x, weights["mix"], weights.get("bias"))
        query, key, value = mixed.view(samples, length, 3, -1, width).permute(2, 0, 3, 1, 4).unbind(0)
        heads = F.scaled_dot_product_attention(query, key, value, dropout_p=share)
        return F.linear(heads.transpose(1, 2).reshape(samples, length, -1), weights["out"])


class VocabularyOfInputs(SplitLayers):
    """An embedding split by its words; a way contributes the vectors of its own words, and zeros."""

    def __init__(self, name: str, module: nn.Embedding, ways: int):
        super().__init__((name,), {"words": module.weight}, module.num_embeddings, ways)

    def term(self, way: int, x: torch.Tensor, weights: Weights, targets: torch.Tensor) -> torch.Tensor:
        least, most, last = int(x.min()), int(x.max()), self.spans[-1].stop - 1
        if least < 0 or most > last:
            raise ConfigurationError(
                f"indices into the embedding {self.layers[0]} must be from 0 to {last}, got {least} to {most}; give "
                "the embedding as many rows as the data have words"
            )
        within, own = _own(x, self.spans[way])
        return F.embedding(within, weights["words"]) * own.unsqueeze(-1)


class VocabularyOfOutputs(SplitLayers):
    """A fully connected layer before a cross entropy, split over ways by its outputs. A way never sends its outputs.

    Element w of a sample's term is the logarithm of the sum of exponentials over the words of way w; the last element
    is the output of the target. From their sum, `cross_entropy` computes the loss.
    """

    def __init__(self, name: str, module: nn.Linear, ways: int):
        parameters = _present(words=module.weight, bias=module.bias)
        super().__init__((name,), parameters, module.out_features, ways)

    def term(self, way: int, x: torch.Tensor, weights: Weights, targets: torch.Tensor) -> torch.Tensor:
        least, most, last = int(targets.min()), int(targets.max()), self.spans[-1].stop - 1
        if least < 0 or most > last:
            raise ConfigurationError(
                f"targets of a cross entropy that is split over ways must be classes from 0 to {last}, got {least} to "
                f"{most}; leave samples without a class out, or use partition=none"
            )
        outputs = F.linear(x, weights["words"], weights.get("bias"))
        within, own = _own(targets, self.spans[way])
        columns = [torch.zeros_like(outputs[..., 0])] * (len(self.spans) + 1)
        columns[way] = outputs.logsumexp(-1)
        columns[-1] = outputs.gather(-1, within.unsqueeze(-1)).squeeze(-1) * own
        return torch.stack(columns, -1)

    @staticmethod
    def cross_entropy(summed: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy, given the sum over all ways of what `term` returns, of shape (…, ways + 1)."""
        return (summed[..., :-1].logsumexp(-1) - summed[..., -1]).mean()


def _own(words: torch.Tensor, span: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of words within a way's vocabulary, 0 for words of other ways, and which words are its own."""
    own = (words >= span.start) & (words < span.stop)
    return (words - span.start) * own, own


@dataclass(frozen=True)
class Passing:
    """What one computation passes on: activations and, inside a residual connection, the connection's inputs."""

    x: torch.Tensor
    residual: torch.Tensor | None = None


class Replicated(ABC):
    """The interface of a computation that every way (every worker of a stage) performs identically."""

    def layers(self, shape: ModelShape) -> list[Layer]:
        """Return the counted layers of the model that are computed."""
        return []

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that the computation reads."""
        return ()

    @abstractmethod
    def run(self, given: Passing, tensors: Tensors) -> Passing:
        """Return the outputs of the computation for the given inputs."""


@dataclass(frozen=True, eq=False)
class Whole(Replicated):
    """A layer that is not split, so that every way (every worker of a stage) computes all of it."""

    layer: ChainLayer

    def layers(self, shape: ModelShape) -> list[Layer]:
        return layers_within(shape, self.layer)

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        return list(self.layer.module.parameters())

    def run(self, given: Passing, tensors: Tensors) -> Passing:
        module = self.layer.module
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        values = {name: tensors[id(one)] for name, one in named if id(one) in tensors}
        return Passing(called(module, values, given.x), given.residual)


@dataclass(frozen=True, eq=False)
class AddBias(Replicated):
    """Adds the bias of split layers to the sum of the layers' terms."""

    bias: nn.Parameter

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        return (self.bias,)

    def run(self, given: Passing, tensors: Tensors) -> Passing:
        return Passing(given.x + tensors.get(id(self.bias), self.bias), given.residual)


class BeginResidual(Replicated):
    """Stores the activations for the end of a residual connection."""

    def run(self, given: Passing, tensors: Tensors) -> Passing:
        return Passing(given.x, given.x)


class EndResidual(Replicated):
    """Adds the activations that were stored at the beginning of a residual connection."""

    def run(self, given: Passing, tensors: Tensors) -> Passing:
        assert given.residual is not None
        return Passing(given.residual + given.x)


@dataclass(frozen=True, eq=False)
class LayerBlock:
    """Computations that every way performs alike, followed by split layers, or None in the last block."""

    whole: Sequence[Replicated]
    split: SplitLayers | None
    divided: bool = False
    """Whether each way performs the computations before the split layers for its own samples only."""

    @cached_property
    def writes_inputs(self) -> bool:
        """Whether the computations before the split layers may write to the inputs of the first."""
        layers = takewhile(lambda one: isinstance(one, Whole), self.whole)
        return writes_inputs(one.layer.module for one in layers if isinstance(one, Whole))

    def divided_by_samples(self, changing: Sequence[str], who: str) -> LayerBlock:
        """Return the block, with the computations before its split layers divided by samples. `changing`: names of the
        model's buffers that change in training; `who`: name of the model in errors.

        Raises:
            ConfigurationError: there are no layers with parameters before the split layers, a residual connection
                begins before the split layers, or a layer computes or stores statistics of its samples.
        """
        layers = [one.layer for one in self.whole if isinstance(one, Whole)]
        if self.split is None or len(layers) < len(self.whole) or not any(one.parameters for one in self.whole):
            names = ", ".join(one.name for one in layers) or "no layer"
            raise ConfigurationError(
                f"convolutions=divided needs layers with parameters before the first split layer of {who}, both in the "
                f"first stage and outside of residual connections, got {names}; use convolutions=replicated"
            )
        for layer in layers:
            if (why := of_all_samples(layer, changing)) is not None:
                raise ConfigurationError(
                    f"layers that are divided by samples must compute each sample on its own, got {why} of {who}; use "
                    "for example nn.GroupNorm, or convolutions=replicated"
                )
        return replace(self, divided=True)


def of_all_samples(layer: ChainLayer, changing: Sequence[str]) -> str | None:
    """Return what a layer has that depends on all samples of a batch, in words; None if nothing is known.

    `changing`: names of the model's buffers that change in training.
    """
    for name, module in layer.module.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            return f"{type(module).__name__} in {layer.named(name) if name else layer.name}"
    names = [layer.named(name) for name, _ in layer.module.named_buffers()]
    changed = next((name for name in names if name in changing), None)
    return None if changed is None else f"the buffer {changed}, which changes in training,"


def all_of_all_samples(chain: Sequence[ChainLayer], changing: Sequence[str]) -> tuple[str, ...]:
    """Return what the layers of a chain have that depends on all samples of a batch, in words."""
    found = (of_all_samples(layer, changing) for layer in chain)
    return tuple(one.removesuffix(",") for one in found if one is not None)


def uses_of(chain: Sequence[ChainLayer]) -> Counter[int]:
    """Return, for the identity of each parameter, the number of layers that use the parameter."""
    return Counter(id(one) for layer in chain for one in set(layer.module.parameters()))


@dataclass
class BlocksOfChain:
    """Divides consecutive layers of a chain into blocks."""

    ways: int
    uses: Counter[int]
    """Identity of each parameter → number of layers of the whole chain that use the parameter."""
    classifies: bool
    """Whether the outputs of the chain go into a mean cross entropy."""
    blocks: list[LayerBlock] = field(default_factory=list)
    _whole: list[Replicated] = field(default_factory=list)

    def of(self, chain: Sequence[ChainLayer]) -> list[LayerBlock]:
        """Return the blocks into which the layers are divided; the last block has no split layers."""
        at = 0
        while at < len(chain):
            layer = chain[at]
            if not self._can_split(layer.module):
                self._whole.append(Whole(layer))
            elif isinstance(layer.module, nn.TransformerEncoderLayer):
                self._encoder(layer.name, layer.module)
            elif isinstance(layer.module, nn.Embedding):
                self._split(VocabularyOfInputs(layer.name, layer.module, self.ways))
            elif isinstance(layer.module, nn.Linear):
                at += self._linear(chain, at)
            at += 1
        self.blocks.append(LayerBlock(self._whole, None))
        return self.blocks

    def _can_split(self, module: nn.Module) -> bool:
        """Whether a layer is of a kind that can be split, and does nothing besides."""
        alone = all(one.requires_grad and self.uses[id(one)] == 1 for one in module.parameters())
        if hooked(module) or not alone:
            return False
        match module:
            case nn.Linear():
                return type(module) is nn.Linear
            case nn.Embedding():
                plain = module.padding_idx is None and module.max_norm is None and not module.scale_grad_by_freq
                return type(module) is nn.Embedding and plain and module.num_embeddings >= self.ways
            case nn.TransformerEncoderLayer():
                attention = module.self_attn
                return (
                    type(module) is nn.TransformerEncoderLayer
                    and attention.batch_first
                    and attention.num_heads >= self.ways
                    and module.activation_relu_or_gelu in (1, 2)
                    and not any(map(hooked, module.modules()))
                )
        return False

    def _split(self, layers: SplitLayers) -> None:
        """End the current block with split layers."""
        self.blocks.append(LayerBlock(self._whole, layers))
        self._whole = []

    def _pair(
        self,
        layers: Sequence[str],
        first: nn.Linear,
        between: Sequence[Callable[[torch.Tensor], torch.Tensor]],
        second: nn.Linear,
    ) -> None:
        self._split(ColumnAndRow(layers, first, between, second, self.ways))
        self._add(second.bias)

    def _add(self, bias: nn.Parameter | None) -> None:
        if bias is not None:
            self._whole.append(AddBias(bias))

    def _linear(self, chain: Sequence[ChainLayer], at: int) -> int:
        """Take in a fully connected layer, or a pair with the layers between; return the number of further layers."""
        layer, end = chain[at], at + 1
        assert isinstance(layer.module, nn.Linear)
        while end < len(chain) and is_elementwise_layer(chain[end].module):
            end += 1
        wide = layer.module.out_features >= self.ways
        second = chain[end].module if end < len(chain) and wide else None
        if isinstance(second, nn.Linear) and self._can_split(second):
            between = [one.module for one in chain[at + 1 : end]]
            self._pair([one.name for one in chain[at : end + 1]], layer.module, between, second)
            return end - at
        if at == len(chain) - 1 and wide and self.classifies:
            self._split(VocabularyOfOutputs(layer.name, layer.module, self.ways))
        else:
            self._whole.append(Whole(layer))
        return 0

    def _encoder(self, name: str, module: nn.TransformerEncoderLayer) -> None:
        """Take in a layer of a transformer: attention and two fully connected layers, each with a residual."""
        norms = [_inside(f"{name}.norm1", module.norm1), _inside(f"{name}.norm2", module.norm2)]
        dropouts = [_inside(f"{name}.dropout1", module.dropout1), _inside(f"{name}.dropout2", module.dropout2)]
        for number in (0, 1):
            self._whole.append(BeginResidual())
            if module.norm_first:
                self._whole.append(norms[number])
            if number == 0:
                self._split(Heads(f"{name}.self_attn", module.self_attn, self.ways))
                self._add(module.self_attn.out_proj.bias)
            else:
                layers = [f"{name}.linear1", f"{name}.dropout", f"{name}.linear2"]
                self._pair(layers, module.linear1, [module.activation, module.dropout], module.linear2)
            self._whole += [dropouts[number], EndResidual()]
            if not module.norm_first:
                self._whole.append(norms[number])


def _inside(name: str, module: nn.Module) -> Whole:
    """A layer inside another one, with its name in the model."""
    return Whole(ChainLayer(name, module, name, (name,)))


def is_elementwise_layer(module: nn.Module) -> bool:
    """Return whether a layer has no parameters and treats every element of its input in the same way."""
    return (type(module) in ELEMENTWISE or is_elementwise(module)) and not hooked(module)


def hooked(module: nn.Module) -> bool:
    """Return whether a module has hooks, which run only if the module itself is called."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))
