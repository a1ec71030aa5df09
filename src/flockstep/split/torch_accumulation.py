"""Adds gradients of weights to their array by a few products of large matrices.

Autograd computes the gradient of a weight for each micro-batch as a separate tensor, and adds it to the gradient of the
earlier micro-batches. With few samples in a micro-batch, these additions move more memory than the products need.
Megatron-LM multiplies and adds at once (Narayanan et al. 2021); zero-bubble schedules compute gradients of weights
later than those of inputs (Qi et al. 2023). This module computes the products of several micro-batches as one product.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 -- what every user of torch calls it
from torch import nn


class WeightGradient:
    """The gradient of a weight (outputs, inputs), accumulated over the micro-batches of a step."""

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None
        """Where backward passes add the gradient; None outside of a pass, where autograd does."""
        self._slopes: list[torch.Tensor] = []
        self._inputs: list[torch.Tensor] = []
        self._held = 0
        """Number of elements in `_slopes` and `_inputs`."""

    def add(self, slopes: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add the product of gradients of outputs (rows, outputs) and inputs (rows, inputs) to the gradient of the
        weight, at once or later.

        Pending factors take at most as much memory as the weight. They are copies, because a model may write its next
        inputs to the same memory.
        """
        assert self.tensor is not None
        self._held += slopes.numel() + inputs.numel()
        waits = self._held <= self.tensor.numel()
        self._slopes.append(slopes.detach().clone() if waits else slopes.detach())
        self._inputs.append(inputs.detach().clone() if waits else inputs.detach())
        if not waits:
            self.complete()

    def complete(self) -> None:
        """Add all pending products to the gradient of the weight."""
        if self.tensor is not None and self._held:
            self.tensor.addmm_(torch.cat(self._slopes).t(), torch.cat(self._inputs))
            self.clear()

    def clear(self) -> None:
        """Drop all pending products instead of adding them to the gradient of the weight."""
        self._slopes, self._inputs, self._held = [], [], 0


def _use(ctx: Any) -> Literal["sum", "result", "none"]:
    """What the backward pass that is running does with the gradient of the weight, the second input of the function:
    it adds the gradient to `ctx.to`, or has it as a result of autograd, or does not need it.

    Backward passes with other aims run inside of a pass, as those of a deep equilibrium model in a hook.
    """
    node = ctx.next_functions[1][0]
    try:
        if node is None or not torch._C._will_engine_execute_node(node):
            return "none"
    except RuntimeError:  # torch.autograd.grad returns the gradient of the weight
        return "result"
    return "result" if ctx.to.tensor is None else "sum"


class _Linear(torch.autograd.Function):
    """`F.linear` whose backward pass adds the gradient of the weight to a `WeightGradient`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, to: WeightGradient
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.to, ctx.biased = to, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, inputs = slope.reshape(-1, slope.shape[-1]), x.reshape(-1, x.shape[-1])
        own: torch.Tensor | None = None
        if (use := _use(ctx)) == "sum":
            ctx.to.add(rows, inputs)
        elif use == "result":
            own = rows.t().mm(inputs)
        below = rows.mm(weight).view(x.shape) if ctx.needs_input_grad[0] else None
        return below, own, rows.sum(0) if ctx.biased else None, None


class _Embedding(torch.autograd.Function):
    """`F.embedding` whose backward pass adds the gradients of the words of a batch to their rows."""

    @staticmethod
    def forward(ctx: Any, words: torch.Tensor, weight: torch.Tensor, to: WeightGradient) -> torch.Tensor:
        ctx.save_for_backward(words)
        ctx.to, ctx.shape = to, weight.shape
        return F.embedding(words, weight)

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (words,) = ctx.saved_tensors
        if (use := _use(ctx)) == "none":
            return None, None, None
        own = ctx.to.tensor if use == "sum" else slope.new_zeros(ctx.shape)
        summed = own.index_add_(0, words.reshape(-1), slope.reshape(-1, slope.shape[-1]))
        return None, None if use == "sum" else summed, None


def fusible(module: nn.Module) -> list[nn.Module]:
    """Return the layers inside `module` whose backward passes can add the gradients of weights directly to an array."""
    return [one for one in module.modules() if "forward" not in vars(one) and _is_plain(one)]


def _is_plain(layer: nn.Module) -> bool:
    if type(layer) is nn.Embedding:
        usual = layer.padding_idx is None and layer.max_norm is None
        return usual and not layer.scale_grad_by_freq and not layer.sparse
    return type(layer) is nn.Linear


class AddedTogether:
    """Context in which the backward passes of layers add the gradients of weights to the sums in `sums`.

    For all other weights, and for a weight whose `WeightGradient` has no tensor, autograd computes the gradients as
    usual.
    """

    def __init__(
        self, layers: Sequence[nn.Module], weights: Sequence[torch.Tensor], sums: Sequence[WeightGradient]
    ) -> None:
        """`layers`: what `fusible` returned; `sums`: the gradient of each of `weights`."""
        self._layers = layers
        self._sums = dict(zip(map(id, weights), sums, strict=True))

    def __enter__(self) -> None:
        for layer in self._layers:
            vars(layer)["forward"] = partial(self._outputs, layer)

    def __exit__(self, *_: object) -> None:
        for layer in self._layers:
            del vars(layer)["forward"]

    def _outputs(self, layer: nn.Module, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 -- as torch calls it
        """What `layer.forward(input)` returns."""
        assert isinstance(layer, nn.Linear | nn.Embedding)
        left = torch.is_autocast_enabled("cpu") or torch._C._are_functorch_transforms_active()
        to = None if left else self._sums.get(id(layer.weight))
        if to is None:
            plain: torch.Tensor = type(layer).forward(layer, input)  # type: ignore[arg-type]
            return plain
        if isinstance(layer, nn.Embedding):
            return _Embedding.apply(input, layer.weight, to)  # type: ignore[no-any-return, no-untyped-call]
        return _Linear.apply(input, layer.weight, layer.bias, to)  # type: ignore[no-any-return, no-untyped-call]
