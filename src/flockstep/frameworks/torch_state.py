"""Converts the state of torch optimizers to flockstep's flat state and back, and to bytes that can be sent to other
ranks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from flockstep.arrays.namespace import to_host
from flockstep.arrays.schema import Entry, FlatArray
from flockstep.errors import ConfigurationError
from flockstep.frameworks.torch_flat import FlatModule
from flockstep.frameworks.torch_groups import NUMBERS
from flockstep.optimizers.base import OptimizerState

_NAMES = {"momentum": "momentum_buffer", "mean": "exp_avg", "square": "exp_avg_sq", "square_sum": "sum"}
"""Slot of flockstep's optimizers → torch's name; slots of torch's optimizers on servers have torch's names."""


def flat_state(flat: FlatModule, optimizer: torch.optim.Optimizer, foreign: bool) -> OptimizerState | None:
    """Return the state of `optimizer` in the layout of the flat array; None before the optimizer's first step.

    `foreign` selects torch's names, for servers that step with torch's own class.

    Raises:
        ConfigurationError: the optimizer's state of a parameter has a narrower dtype than the flat array.
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
                if float(state.get("step", 1)):  # Adagrad has a state before its first step
                    _require_whole(entry, name, value, flat.schema.dtype)
                slot = found.slots.setdefault(
                    name if foreign else ours[name], np.zeros(flat.schema.size, flat.schema.dtype)
                )
                slot[entry.offset : entry.offset + entry.size] = to_host(value.reshape(-1))
                found.steps = max(found.steps, int("step" not in state))  # SGD does not count
    return found if found.steps else None


def set_state(flat: FlatModule, optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
    """Set the state of `optimizer` to `state`. The optimizer's tensors become views of the slots of `state`, in the
    dtype of the flat array.
    """
    if not (state.steps and state.slots):
        return
    groups = _groups(optimizer)
    for entry, parameter in zip(flat.schema.entries, flat.parameters, strict=True):
        own = optimizer.state[parameter]
        if not isinstance(optimizer, torch.optim.SGD):
            own["step"] = torch.tensor(float(state.steps))
        for name, slot in state.slots.items():
            part = slot[entry.offset : entry.offset + entry.size]
            own[_NAMES.get(name, name)] = torch.from_numpy(part).reshape(entry.shape).to(parameter.device)
        for key, value in state.numbers.items():
            name, _, group = key.partition(":")
            if int(group) == groups[id(parameter)]:
                own[name] = torch.tensor(value)


def set_unrounded(optimizer: torch.optim.Optimizer, state: dict[str, Any], keep: bool) -> None:
    """Restore, after `optimizer` has loaded `state`, the values that torch rounded to the parameters' dtypes.

    If `keep` is false, as for workers whose optimizer steps in the parameters' dtypes, a rounded value is refused.

    Raises:
        ConfigurationError: `keep` is false, and a value was rounded to another value.
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


def _require_whole(entry: Entry, name: str, value: torch.Tensor, dtype: str) -> None:
    if value.dtype.itemsize < getattr(torch, dtype).itemsize:
        raise ConfigurationError(
            f"servers store {name} in {dtype}, but the state loaded for {entry.name} is rounded to "
            f"{_short(value.dtype)}; after flockstep.distribute load the state that the servers saved, with "
            "optimizer.load_state_dict(), or continue from the model alone"
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def packed(state: dict[str, Any], whole: bool = True) -> FlatArray:
    """Return an optimizer's `state_dict` as bytes (uint8): a line of JSON, followed by the elements of all tensors.

    Raises:
        ConfigurationError: `whole` is true and the state contains a value that cannot be converted to bytes.
    """
    tensors: list[torch.Tensor] = []
    line = json.dumps(_plain(state, tensors, whole)).encode() + b"\n"
    return np.concatenate([np.frombuffer(line, np.uint8), *map(bytes_of, tensors)])


def unpacked(array: FlatArray) -> dict[str, Any]:
    """Return the `state_dict` of an optimizer, given as bytes that `packed` returned."""
    end = int(np.argmax(array == ord("\n"))) + 1
    state: dict[str, Any] = _restored(json.loads(array[:end].tobytes()), array[end:], [0])
    return state


def bytes_of(tensor: torch.Tensor) -> FlatArray:
    """Return the elements of a tensor as bytes (uint8)."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def tensor_of(data: FlatArray, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor, given as bytes that `bytes_of` returned."""
    if not len(data):
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.from_numpy(to_host(data).copy()).view(dtype).reshape(tuple(shape))


def _plain(value: Any, tensors: list[torch.Tensor], whole: bool) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": [str(value.dtype).removeprefix("torch."), *value.shape]}
    if isinstance(value, dict):
        return {"dict": [[key, _plain(own, tensors, whole)] for key, own in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_plain(own, tensors, whole) for own in value]}
    if isinstance(value, list):
        return [_plain(own, tensors, whole) for own in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if not whole:
        return type(value).__name__
    raise ConfigurationError(
        f"the state of an optimizer must consist of tensors, numbers and strings, got a {type(value).__name__}; load "
        "such a state on every rank before flockstep.distribute"
    )


def _restored(value: Any, data: FlatArray, read: list[int]) -> Any:
    if isinstance(value, list):
        return [_restored(own, data, read) for own in value]
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        return {key: _restored(own, data, read) for key, own in value["dict"]}
    if "tuple" in value:
        return tuple(_restored(own, data, read) for own in value["tuple"])
    kind, *shape = value["tensor"]
    dtype = getattr(torch, kind)
    start, read[0] = read[0], read[0] + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    return tensor_of(data[start : read[0]], dtype, shape)


def _groups(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Return id of a parameter → number of its group."""
    return {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
