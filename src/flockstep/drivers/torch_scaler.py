"""Keeps the scales of all ranks' gradient scalers equal.

Under DDP every rank looks for overflows in the mean gradient, so that all scalers back off together. Here a scaler
looks at the gradient of its own rank; `torch.amp.GradScaler.update` is extended by what the other ranks have found.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

_overflowed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers whose last step all ranks have skipped, because a gradient overflowed on one rank."""


@functools.cache
def _extend_scalers() -> None:
    """Let every scaler back off after a step that all ranks have skipped."""
    update = torch.amp.GradScaler.update

    @functools.wraps(update)
    def update_together(scaler: Any, *arguments: Any, **options: Any) -> None:
        states = scaler._per_optimizer_states if scaler.is_enabled() else {}
        for optimizer in [each for each in _overflowed if id(each) in states]:
            for found in states[id(optimizer)]["found_inf_per_device"].values():
                found.fill_(1.0)
            _overflowed.discard(optimizer)
        update(scaler, *arguments, **options)

    torch.amp.GradScaler.update = update_together  # type: ignore[assignment, method-assign]


def note_overflow(optimizer: torch.optim.Optimizer, skipped: bool) -> None:
    """Store whether all ranks have skipped the step of an optimizer, for the scaler that made the step."""
    _extend_scalers()
    if skipped:
        _overflowed.add(optimizer)
    else:
        _overflowed.discard(optimizer)
