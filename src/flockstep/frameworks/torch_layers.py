"""Finds the layers of a torch module, with parameters, work, depth and bytes, by running it once on samples."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from flockstep.costs.layers import NOTHING, Layer, ModelShape, Pass
from flockstep.errors import ConfigurationError, FlockstepError, in_short, require
from flockstep.frameworks.torch_kinds import ModuleCall, is_known, layer_of, unknown

NOTE = "found by running the module; layers are assumed to run one after the other"
WHOLE = "(model)"
"""Name of the layer that counts the work which a model does outside of its children."""


def shape_of(module: nn.Module, *inputs: Any, batch: int | None = None, name: str | None = None) -> ModelShape:
    """Return the layers of `module`, found in one call with `inputs` in the module's current mode.

    Leaf modules of torch are counted by formulas. For all other modules, and for operations of a module outside of its
    children, torch's flop counter counts the products; if the flop counter finds no product in a leaf, the layer is
    marked as unknown. A module's second run is a layer without parameters, weights used twice belong to the layer that
    uses them first, and parameters that no layer uses form the last layer. Elementwise work outside of modules (sums of
    branches, masks) is not counted. Mode, buffers, attributes and random state are restored afterwards, also after an
    error.

    Args:
        module: the module, which is called once.
        inputs: the inputs with which the module is called.
        batch: number of samples in `inputs`; by default the length of the first tensor.
        name: the model's name; by default the name of its class.

    Raises:
        ConfigurationError: `module` is not a module, has parameters without a shape or no inputs, or fails on these
            inputs.
    """
    if not isinstance(module, nn.Module):
        raise ConfigurationError(
            f"layers can be found only in a torch.nn.Module, got {type(module).__name__}; pass the model"
        )
    title = type(module).__name__ if name is None else name
    lazy = next((key for key, one in module.named_parameters() if isinstance(one, UninitializedParameter)), None)
    if lazy is not None:
        raise ConfigurationError(
            f"parameter {lazy!r} of {title} has no shape yet; call the module once before counting its layers"
        )
    tensors = [one for one in tree_leaves(inputs) if isinstance(one, torch.Tensor)]
    if batch is None:
        if not tensors or not tensors[0].dim():
            raise ConfigurationError(
                f"{title} needs an input tensor with a batch axis to find the number of samples, got none; pass batch="
            )
        batch = len(tensors[0])
    require(batch >= 1, "batch", ">= 1", batch, "pass at least one sample")
    found = _Finder(module, title, batch)
    with _kept(module, tensors):
        try:
            found.run(inputs)
        except FlockstepError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"{title} failed on the sample batch: {in_short(error)}; pass inputs that the model accepts"
            ) from error
    itemsize = next((one.element_size() for one in module.parameters()), 4)
    return ModelShape(title, found.finished(), itemsize, NOTE)


@dataclasses.dataclass
class _Frame:
    """A call of a module that is in progress, with the operations counted before it and inside it."""

    before: int
    inside: int = 0


class _Finder:
    """Hooks that turn the calls of modules into layers."""

    def __init__(self, module: nn.Module, title: str, batch: int):
        self.module, self.title, self.batch = module, title, batch
        self.layers: list[Layer] = []
        self._names: dict[nn.Module, str] = {}
        self._leaves: set[nn.Module] = set()
        self._visit("", module)
        if module not in self._leaves:
            self._names[module] = WHOLE
        self._calls: Counter[str] = Counter()
        self._owners: dict[int, str] = {}
        self._frames: list[_Frame] = []
        # not if formulas cover everything: the counter imports torch's compiler, which takes longer than all the rest
        counts = any(not is_known(one) and type(one).forward is not nn.Sequential.forward for one in self._names)
        self._counter = FlopCounterMode(display=False) if counts else None

    def _visit(self, path: str, module: nn.Module) -> None:
        """Name the modules to watch; modules inside a leaf are part of the leaf."""
        if module in self._names:
            return
        self._names[module] = path or self.title
        if is_known(module) or next(module.children(), None) is None:
            self._leaves.add(module)
            return
        for name, child in module.named_children():
            self._visit(f"{path}.{name}" if path else name, child)

    def run(self, inputs: tuple[Any, ...]) -> None:
        """Call the module with the hooks installed."""
        with contextlib.ExitStack() as stack:
            for module in self._names:
                stack.callback(module.register_forward_pre_hook(self._enter, prepend=True).remove)
                stack.callback(module.register_forward_hook(self._leave, with_kwargs=True).remove)
            stack.enter_context(torch.enable_grad())
            if self._counter is not None:
                # the other kernels of attention are not all known to the counter
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
                stack.enter_context(self._counter)
            self.module(*inputs)

    def _counted(self) -> int:
        """Return the number of operations of products counted so far."""
        return 0 if self._counter is None else self._counter.get_total_flops()

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self._frames.append(_Frame(self._counted()))

    def _leave(self, module: nn.Module, inputs: Any, keywords: Any, outputs: Any) -> None:
        frame = self._frames.pop()
        spent = self._counted() - frame.before
        if self._frames:
            self._frames[-1].inside += spent
        leaf = module in self._leaves
        own = list(module.parameters(recurse=leaf))
        if leaf or own or spent > frame.inside:
            self._add(module, (inputs, keywords), outputs, spent - frame.inside, own)

    def _add(self, module: nn.Module, inputs: Any, outputs: Any, flops: int, own: list[nn.Parameter]) -> None:
        base = self._names[module]
        self._calls[base] += 1
        name = base if self._calls[base] == 1 else f"{base} (call {self._calls[base]})"
        reads, writes = _tensors(inputs), _tensors(outputs)
        # what a module computes besides its children works on their outputs, whatever its inputs
        data = module in self._leaves and not any(one.requires_grad for one in reads)
        call = ModuleCall(name, module, reads, writes, self.batch, data)
        layer = layer_of(call) if module in self._leaves else None
        layer = unknown(call, flops, bool(own)) if layer is None else layer
        new = {id(one): one for one in own if id(one) not in self._owners}
        tied = next((self._owners[id(one)] for one in own if id(one) in self._owners), None)
        self._owners.update(dict.fromkeys(new, name))
        self.layers.append(
            dataclasses.replace(
                layer,
                by_weight=layer.by_weight if any(one.requires_grad for one in own) else NOTHING,
                parameters=sum(one.numel() for one in new.values()),
                trained=sum(one.numel() for one in new.values() if one.requires_grad),
                tied=tied,
            )
        )

    def finished(self) -> tuple[Layer, ...]:
        """Return the layers, including one for parameters that no call used."""
        rest = [one for one in self.module.parameters() if id(one) not in self._owners]
        if rest:
            count, trained = sum(one.numel() for one in rest), sum(one.numel() for one in rest if one.requires_grad)
            self.layers.append(Layer("(not used)", "unused", parameters=count, trained=trained, forward=Pass()))
        if not self.layers:
            raise ConfigurationError(
                f"{self.title} called no module and has no parameters, so no layer can be counted; give another model"
            )
        return tuple(self.layers)


def _tensors(tree: Any) -> tuple[torch.Tensor, ...]:
    return tuple(one for one in tree_leaves(tree) if isinstance(one, torch.Tensor))


@contextlib.contextmanager
def _kept(module: nn.Module, inputs: list[torch.Tensor]) -> Iterator[None]:
    """Restore attributes, modes, buffers and random state when the context ends, also after an error."""
    attributes = {one: dict(vars(one)) for one in module.modules()}
    buffers = {one: dict(one._buffers) for one in module.modules()}
    values = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    tensors = [*inputs, *module.parameters()]
    devices = sorted({one.device.index for one in tensors if one.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for one, saved in attributes.items():
                vars(one).clear()
                vars(one).update(saved)
                one._buffers.clear()
                one._buffers.update(buffers[one])
            with torch.no_grad():
                for buffer, value in values:
                    buffer.copy_(value)
