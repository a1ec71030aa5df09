"""Torch layers split over ways (the workers of a stage): each way's parameters, and its term of the output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 -- what every user of torch calls it
from torch import nn

from flockstep.arrays.schema import slices
from flockstep.errors import ConfigurationError

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
