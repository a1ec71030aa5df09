"""Calls a torch module with other parameters and buffers than the module's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.func import functional_call


def called(module: torch.nn.Module, values: Mapping[str, torch.Tensor], inputs: torch.Tensor) -> Any:
    """Return the module's outputs with `values` in place of the parameters and buffers of these names.

    The value of a tied tensor is given under its first name. Afterwards the module is unchanged, even if it contains a
    module twice; torch's `tie_weights` would exchange the tensors of such a module twice and restore the wrong tensors.
    """
    first: dict[int, str] = {}
    given: dict[str, torch.Tensor] = {}
    for path, owner in module.named_modules():
        for own in (owner.named_parameters, owner.named_buffers):
            for name, tensor in own(path, recurse=False, remove_duplicate=False):
                source = first.setdefault(id(tensor), name)
                if source in values:
                    given[name] = values[source]
    return functional_call(module, given, (inputs,), tie_weights=False)
