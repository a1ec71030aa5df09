"""Computes the gradients of a torch module's fully connected layers as factors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from flockstep.arrays.factors import FactoredWeight, Packing
from flockstep.arrays.schema import FlatArray
from flockstep.frameworks.base import Engine, Indices
from flockstep.frameworks.torch_flat import FlatModule

TOLERANCE = {"float16": 2e-2, "float32": 1e-4, "float64": 1e-9}
"""Dtype → largest relative distance of a layer's gradient from its factors' product that is rounding."""
Factors = tuple[FlatArray, FlatArray]


class FactoringEngine(Engine):
    """Computes gradients of `torch.nn.Linear` as factors: inputs of the modules and gradients of their outputs."""

    module: torch.nn.Module
    flat: FlatModule
    _layers: dict[int, tuple[FactoredWeight, ...]]

    def layers(self, batch: int) -> tuple[FactoredWeight, ...]:
        """Return the Linear modules whose weights no other operation uses, as found in a trial."""
        known = self.__dict__.setdefault("_layers", {})
        if batch not in known:
            known[batch] = self._find(np.arange(batch, dtype=np.int64) % self.train_size)
        found: tuple[FactoredWeight, ...] = known[batch]
        return found

    def factored(
        self,
        params: FlatArray,
        indices: Indices,
        layers: Sequence[FactoredWeight],
        out: FlatArray,
        replica: int,
        step: int,
    ) -> float:
        """Compute a gradient in which the matrices of `layers`, which autograd computes too, are packed as factors."""
        dense = np.empty(self.schema.size, out.dtype)
        modules = dict(self._linear())
        with captured([modules[layer.offset] for layer in layers]) as factors:
            loss = self.gradient(params, indices, dense, replica, step)
        Packing(len(dense), layers).pack(dense, [factors() for factors in factors], out)
        return loss

    def _linear(self) -> Iterator[tuple[int, torch.nn.Linear]]:
        """Yield offset and module of each Linear with a trainable weight, used once, of the flat dtype."""
        modules = list(self.module.modules())
        uses = Counter(id(p) for module in modules for p in module.parameters(recurse=False))
        pairs = zip(self.schema.entries, self.flat.parameters, strict=True)
        offsets = {id(p): e.offset for e, p in pairs if not e.dtype}
        for module in modules:
            if isinstance(module, torch.nn.Linear) and id(module.weight) in offsets and uses[id(module.weight)] == 1:
                yield offsets[id(module.weight)], module

    def _find(self, indices: Indices) -> tuple[FactoredWeight, ...]:
        buffers, dense = self.buffers(0), np.empty_like(self.flat.params)
        candidates = sorted(self._linear(), key=lambda pair: pair[0])
        with captured([module for _, module in candidates]) as factors:
            self.gradient(self.flat.params, indices, dense)
        self.restore_buffers(0, buffers)
        found = []
        for (offset, _), get in zip(candidates, factors, strict=True):
            u, v = get()
            layer = FactoredWeight(offset, u.shape[1], v.shape[1], len(u))
            slope = dense[offset : offset + layer.dense].reshape(layer.rows, layer.columns)
            distance = np.linalg.norm((u.T @ v - slope).astype(np.float64))
            if len(u) and distance <= TOLERANCE[self.schema.dtype] * np.linalg.norm(slope.astype(np.float64)):
                found.append(layer)
        return tuple(found)


class FactorRecorder:
    """Records the factors of one module in a forward and backward pass: two arrays for each use of the module."""

    def __init__(self, module: torch.nn.Linear):
        self._module = module
        self._inputs: list[torch.Tensor] = []
        self._slopes: dict[int, torch.Tensor] = {}

    def __call__(self) -> Factors:
        """Return U (products, rows) and V (products, columns), without rows if the module was not used."""
        calls = sorted(self._slopes)
        u = [self._slopes[call].reshape(-1, self._module.out_features) for call in calls]
        v = [self._inputs[call].reshape(-1, self._module.in_features) for call in calls]
        if not calls:
            return np.empty((0, self._module.out_features)), np.empty((0, self._module.in_features))
        return torch.cat(u).numpy(), torch.cat(v).numpy()

    def hook(self, module: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """Store the module's input now, and the gradient of its output once autograd has computed it."""
        call = len(self._inputs)
        self._inputs.append(inputs[0].detach())

        def keep(slope: torch.Tensor) -> None:
            self._slopes[call] = slope.detach()

        if output.requires_grad:
            output.register_hook(keep)  # type: ignore[no-untyped-call]
        return output.clone()  # later operations may work in place; the gradient is that of the value before


@contextmanager
def captured(modules: Sequence[torch.nn.Linear]) -> Iterator[list[FactorRecorder]]:
    """Return a context that yields, for each module in order, a recorder of inputs and gradients of outputs."""
    traces = [FactorRecorder(module) for module in modules]
    handles = [m.register_forward_hook(trace.hook) for m, trace in zip(modules, traces, strict=True)]
    try:
        yield traces
    finally:
        for handle in handles:
            handle.remove()
