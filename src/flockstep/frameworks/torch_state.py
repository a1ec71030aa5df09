"""What torch's optimizers remember of past steps, as the flat state of ours, and back."""

from __future__ import annotations

import numpy as np
import torch

from flockstep.frameworks.torch_flat import FlatModule
from flockstep.optimizers.base import OptimizerState

_NAMES: dict[type, dict[str, str]] = {
    torch.optim.SGD: {"momentum": "momentum_buffer"},
    torch.optim.Adam: {"mean": "exp_avg", "square": "exp_avg_sq"},
    torch.optim.AdamW: {"mean": "exp_avg", "square": "exp_avg_sq"},
    torch.optim.Adagrad: {"square_sum": "sum"},
}
"""Name of each slot in ours → in torch's."""


def flat_state(flat: FlatModule, optimizer: torch.optim.Optimizer) -> OptimizerState | None:
    """What `optimizer` remembers, in the layout of the flat array; None before its first step."""
    found = OptimizerState()
    for entry, parameter in zip(flat.schema.entries, flat.parameters, strict=True):
        state = optimizer.state.get(parameter, {})
        found.steps = max(found.steps, float(state.get("step", 0)))
        for ours, theirs in _NAMES.get(type(optimizer), {}).items():
            if (value := state.get(theirs)) is not None:
                slot = found.slots.setdefault(ours, np.zeros_like(flat.params))
                slot[entry.offset : entry.offset + entry.size] = value.detach().reshape(-1).numpy()
                found.steps = max(found.steps, int("step" not in state))  # SGD does not count
    return found if found.steps else None


def set_state(flat: FlatModule, optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
    """Let `optimizer` remember what `state` holds."""
    if not (state.steps and state.slots):
        return
    names = _NAMES[type(optimizer)]
    for entry, parameter in zip(flat.schema.entries, flat.parameters, strict=True):
        own = optimizer.state[parameter]
        if not isinstance(optimizer, torch.optim.SGD):
            own["step"] = torch.tensor(float(state.steps))
        for ours, slot in state.slots.items():
            part = slot[entry.offset : entry.offset + entry.size]
            own[names[ours]] = torch.from_numpy(part.copy()).reshape(entry.shape)
