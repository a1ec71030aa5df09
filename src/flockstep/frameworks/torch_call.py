"""Calls of a torch module with parameters and buffers other than its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


class Substituted:
    """A torch module whose forward pass is computed with parameters and buffers other than its own."""

    def __init__(self, module: torch.nn.Module):
        """Find the places of the tensors of `module`, which stay the same from call to call."""
        self._module = module
        first: dict[int, str] = {}
        self._places: list[tuple[dict[str, Any], str, str]] = []
        """Table of a module inside, key in the table, and name in `module` of the tensor there; a tied tensor has its
        first name.
        """
        for path, owner in module.named_modules():
            for table in (owner._parameters, owner._buffers):
                for key, tensor in table.items():
                    if tensor is not None:
                        name = first.setdefault(id(tensor), f"{path}.{key}" if path else key)
                        self._places.append((table, key, name))

    def __call__(self, values: Mapping[str, torch.Tensor], inputs: torch.Tensor) -> Any:
        """Return the outputs with `values` in place of the parameters and buffers of these names."""
        with self.holding(values):
            return self._module(inputs)

    @contextmanager
    def holding(self, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Return a context in which `values` take the place of the parameters and buffers of the same names.

        A tied tensor has its value under its first name. Afterwards the module is as before, even if a module appears
        in it twice.
        """
        before = [(table, key, table[key]) for table, key, name in self._places if name in values]
        try:
            for table, key, name in self._places:
                if name in values:
                    table[key] = values[name]
            yield
        finally:
            for table, key, tensor in before:
                table[key] = tensor


def called(module: torch.nn.Module, values: Mapping[str, torch.Tensor], inputs: torch.Tensor) -> Any:
    """Return the outputs of `module` with `values` in place of the module's parameters and buffers."""
    return Substituted(module)(values, inputs)
