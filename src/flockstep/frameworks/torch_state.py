"""Converts the state of torch optimizers to flockstep's flat state and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flockstep.arrays.namespace import to_host
from flockstep.errors import ConfigurationError
from flockstep.frameworks.torch_dtensors import like, local
from flockstep.frameworks.torch_flat import FlatModule
from flockstep.frameworks.torch_groups import NUMBERS
from flockstep.optimizers.base import OptimizerState

_NAMES = {"momentum": "momentum_buffer", "mean": "exp_avg", "square": "exp_avg_sq", "square_sum": "sum"}
"""Slot of flockstep's optimizers → torch's name; slots of torch's optimizers on servers have torch's names."""


def flat_state(flat: FlatModule, optimizer: torch.optim.Optimizer, foreign: bool) -> OptimizerState | None:
    """Return the state of `optimizer` in the layout of the flat array; None before the optimizer's first step.
    `foreign` selects torch's names, for servers that step with torch's own class. Raise `ConfigurationError` if a
    state has a narrower dtype than the flat array.
    """
    ours = {theirs: name for name, theirs in _NAMES.items()}
    found, groups = OptimizerState(), _groups(optimizer)
    for entry, parameter in zip(flat.schema.entries, flat.parameters, strict=True):
        state = optimizer.state.get(parameter, {})
        found.steps = max(found.steps, float(state.get("step", 0)))
        for name, value in state.items():
            if name in NUMBERS:
                found.numbers[f"{name}:{groups[id(parameter)]}"] = float(value)
            elif name != "step" and value is not None and (foreign or name in ours):
                stepped = float(state.get("step", 1))  # Adagrad has a state before its first step
                if stepped and value.dtype.itemsize < getattr(torch, flat.schema.dtype).itemsize:
                    raise ConfigurationError(
                        f"servers store {name} in {flat.schema.dtype}, but the state loaded for {entry.name} is "
                        f"rounded to {_short(value.dtype)}; after flockstep.distribute load the state that "
                        "the servers saved, with optimizer.load_state_dict(), or continue from the model alone"
                    )
                slot = found.slots.setdefault(
                    name if foreign else ours[name], np.zeros(flat.schema.size, flat.schema.dtype)
                )
                slot[entry.offset : entry.offset + entry.size] = to_host(local(value).reshape(-1))
                found.steps = max(found.steps, int("step" not in state))  # SGD does not count
    return found if found.steps else None


def set_state(flat: FlatModule, optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
    """Set the state of `optimizer` to views of the slots of `state`, in the dtype of the flat array."""
    if not (state.steps and state.slots):
        return
    groups = _groups(optimizer)
    for entry, parameter in zip(flat.schema.entries, flat.parameters, strict=True):
        own = optimizer.state[parameter]
        if not isinstance(optimizer, torch.optim.SGD):
            own["step"] = torch.tensor(float(state.steps))
        for name, slot in state.slots.items():
            part = slot[entry.offset : entry.offset + entry.size]
            tensor = torch.from_numpy(part).reshape(entry.shape).to(parameter.device)
            own[_NAMES.get(name, name)] = like(tensor, parameter)
        for key, value in state.numbers.items():
            name, _, group = key.partition(":")
            if int(group) == groups[id(parameter)]:
                own[name] = torch.tensor(value)


def set_unrounded(optimizer: torch.optim.Optimizer, state: dict[str, Any], keep: bool) -> None:
    """Restore, after `optimizer` has loaded `state`, the values that torch rounded to the parameters' dtypes. If `keep`
    is false, as for workers whose optimizer steps in these dtypes, raise `ConfigurationError` if a value was rounded
    to another one.
    """
    keys = [key for group in state["param_groups"] for key in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for key, parameter in zip(keys, parameters, strict=True):
        own = optimizer.state.get(parameter, {})
        for name, value in state["state"].get(key, {}).items():
            if not isinstance(value, torch.Tensor) or name not in own or name == "step":
                continue
            if value.dtype.itemsize <= own[name].dtype.itemsize:
                continue
            if keep:
                own[name] = value.to(parameter.device)
            elif not torch.equal(own[name].to(value), value):
                raise ConfigurationError(
                    f"the loaded state has {name} of a parameter in {_short(value.dtype)}, as servers store it, but "
                    f"this optimizer would round it to {_short(parameter.dtype)}; load the state under a strategy "
                    "whose servers update the parameters, or continue from the model alone"
                )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _groups(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Return id of a parameter → number of its group."""
    return {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
