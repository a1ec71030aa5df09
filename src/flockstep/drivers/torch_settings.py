"""Refuses optimizers whose settings differ between ranks, under strategies that apply the settings of one rank for all
ranks.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from flockstep.drivers.loop import Loop
from flockstep.drivers.program_restart import notes_of_all
from flockstep.errors import ConfigurationError
from flockstep.frameworks.torch_optimizers import base_lr, settings_of
from flockstep.messages import Fields
from flockstep.nodes import Worker
from flockstep.strategies.base import Strategy


def require_same_settings(optimizer: torch.optim.Optimizer, loop: Loop) -> None:
    """Compare the settings of all ranks' optimizers; every rank calls this at `distribute`.

    Settings may differ if each worker steps with its own gradient. Learning rates may also differ if servers apply each
    gradient alone, at the learning rate that its worker sends with it. A rank without a loaded state takes the settings
    that rank 0 has loaded. In a resumed run all settings come from one checkpoint, whose workers may be at different
    steps of a schedule, so nothing is compared.

    Raises:
        ConfigurationError: a setting differs that must be equal.
    """
    if loop.workers > 1 and not loop.resumed:
        loop.exchange("settings", lambda me: compare_settings(me, optimizer, loop.strategy))


async def compare_settings(me: Worker, optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
    """Compare the settings of this worker's `optimizer` with those of all other workers.

    Raises:
        ConfigurationError: a setting differs that must be equal.
    """
    traits, groups = strategy.traits, settings_of(optimizer)
    if not (traits.alike or traits.server_optimizer):
        return
    if traits.own_rates:
        rate = base_lr(optimizer)
        for group in (one for one in groups if "lr" in one):
            group["lr"] = float(f"{group['lr'] / rate:.12g}") if rate else 1.0
    own: Fields = {
        "kind": type(optimizer).__name__,
        "groups": json.dumps(groups, default=lambda value: type(value).__name__),
        "loaded": int(bool(optimizer.state)),
    }
    notes = await notes_of_all(me, "settings", own)
    root = min(notes)
    for rank in sorted(notes):
        replaced = notes[root]["loaded"] and not notes[rank]["loaded"]
        found = None if replaced else _difference(notes[root], notes[rank])
        if found is not None:
            name, first, other = found
            raise ConfigurationError(
                f"{name} must be the same on all workers, because {_why(strategy)}, got {first} on worker {root} and "
                f"{other} on worker {rank}; give all workers the same optimizer, and if one loads a saved state, let "
                "all of them load it, or use a strategy whose workers update their own parameters, such as local_sgd"
            )


def _difference(one: Fields, other: Fields) -> tuple[str, Any, Any] | None:
    """What differs between two ranks' optimizers, and both values; None if nothing does."""
    if one["kind"] != other["kind"]:
        return "the class of the optimizer", one["kind"], other["kind"]
    ours, theirs = json.loads(str(one["groups"])), json.loads(str(other["groups"]))
    if len(ours) != len(theirs):
        return f"the number of parameter groups of {one['kind']}", len(ours), len(theirs)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for name in a | b:
            if a.get(name) != b.get(name):
                group = f" in group {number}" if len(ours) > 1 else ""
                return f"{name} of {one['kind']}{group}", a.get(name), b.get(name)
    return None


def _why(strategy: Strategy) -> str:
    """Why the workers' settings must be equal."""
    if strategy.traits.alike:
        return f"all workers of {strategy} step along the same gradient"
    if strategy.traits.memory == "slices":
        return f"each worker of {strategy} updates a part of the common model"
    return f"the servers of {strategy} update the parameters for all workers"
