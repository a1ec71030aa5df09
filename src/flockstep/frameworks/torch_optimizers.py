"""Converts torch's optimizers to flockstep optimizers with the same class and hyper-parameters, or refuses."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Rational
from typing import Any

import numpy as np
import torch

from flockstep.errors import ConfigurationError
from flockstep.frameworks.torch_flat import FlatModule
from flockstep.frameworks.torch_groups import ELEMENTWISE, TorchOptimizer
from flockstep.optimizers.adagrad import Adagrad
from flockstep.optimizers.adam import Adam, AdamW
from flockstep.optimizers.base import Optimizer
from flockstep.optimizers.clipped import Clipped
from flockstep.optimizers.sgd import SGD

_HOW = {"params", "param_names", "foreach", "fused", "capturable", "differentiable", "initial_lr"}
_SCHEDULE = {"max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
"""Entries of a param group that control how a step is computed or scheduled, not its result."""


LONGEST = 64
"""Number of elements of an array in a parameter group that are compared with those of other ranks."""


@dataclass(frozen=True)
class _Rule:
    """The flockstep class for a torch class, the settings that both have, and the settings that must have one value."""

    build: Callable[..., Optimizer]
    same: tuple[str, ...]
    must: dict[str, Any]
    renamed: Callable[[dict[str, Any]], dict[str, Any]] = lambda group: {}


def _betas(group: dict[str, Any]) -> dict[str, Any]:
    return {"beta1": float(group["betas"][0]), "beta2": float(group["betas"][1])}


_ADAM = {"amsgrad": False, "maximize": False}
_RULES: dict[type, _Rule] = {
    torch.optim.SGD: _Rule(SGD, ("lr", "momentum", "dampening", "weight_decay", "nesterov"), {"maximize": False}),
    torch.optim.Adam: _Rule(Adam, ("lr", "eps", "weight_decay"), {**_ADAM, "decoupled_weight_decay": False}, _betas),
    torch.optim.AdamW: _Rule(AdamW, ("lr", "eps", "weight_decay"), {**_ADAM, "decoupled_weight_decay": True}, _betas),
    torch.optim.Adagrad: _Rule(
        Adagrad, ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"), {"maximize": False}
    ),
}


def from_torch(optimizer: torch.optim.Optimizer) -> Optimizer:
    """Return the flockstep optimizer of the same class with the same hyper-parameters and a fresh state; raise
    `ConfigurationError` if there is none, or param groups differ.
    """
    who = type(optimizer).__name__
    rule = _RULES.get(type(optimizer))
    if rule is None:
        known = ", ".join(kind.__name__ for kind in _RULES)
        raise ConfigurationError(
            f"the optimizer must be one of torch.optim's {known}, got {who}; choose one of these, or a strategy whose "
            "servers need no optimizer"
        )
    group, *others = optimizer.param_groups
    for number, other in enumerate(others, start=1):
        for name in sorted((group.keys() | other.keys()) & optimizer.defaults.keys() - _HOW):
            if group.get(name) != other.get(name):
                raise ConfigurationError(
                    f"all param groups of {who} must have the same {name}, got {group.get(name)} in group 0 and "
                    f"{other.get(name)} in group {number}; pass all parameters in one group"
                )
    for name, value in group.items():
        if name in rule.must and value != rule.must[name]:
            raise ConfigurationError(
                f"{name} of {who} must be {rule.must[name]}, got {value!r}; leave it out, because flockstep has no "
                "such setting"
            )
        if name in optimizer.defaults.keys() - {*rule.same, *rule.must, *_HOW, "betas"}:  # of a later torch
            raise ConfigurationError(
                f"{who} has the setting {name}={value!r}, which flockstep does not know; use a plain torch.optim.{who}"
            )
    values = {name: _plain(group[name]) for name in rule.same}
    return rule.build(**values, **rule.renamed(group))


def for_servers(
    optimizer: torch.optim.Optimizer, flat: FlatModule, max_norm: float = 0.0, as_torch: bool = False
) -> Optimizer:
    """Return a script's optimizer as a flockstep optimizer that can step slices of the flat array; raise
    `ConfigurationError` if it is not known to be elementwise. If `max_norm` > 0, it first clips gradients. With
    `as_torch`, torch's own class is used, whose bits are those of the script's optimizer.
    """
    kind = type(optimizer)
    plain = _RULES.get(kind)
    group = optimizer.param_groups[0]
    simple = plain and not as_torch and len(optimizer.param_groups) == 1
    if plain and simple and all(group[name] == plain.must[name] for name in plain.must):
        found = from_torch(optimizer)
    elif kind.__name__ in ELEMENTWISE and getattr(torch.optim, kind.__name__) is kind:
        found = _grouped(optimizer, flat)
    else:
        raise ConfigurationError(
            f"servers update slices of the parameters, and flockstep does not know whether {kind.__name__} allows "
            f"this; use one of torch.optim's {', '.join(ELEMENTWISE)}, or a strategy whose workers update the "
            "parameters, such as all_reduce, bucketed or local_sgd"
        )
    return Clipped(found, max_norm) if max_norm else found


def same_settings(one: Optimizer, other: Optimizer) -> bool:
    """Return whether two forms of a script's optimizer differ at most in the learning rate."""
    if isinstance(one, Clipped) and isinstance(other, Clipped):
        return one.max_norm == other.max_norm and same_settings(one.optimizer, other.optimizer)
    return type(one) is type(other) and replace(one, lr=1.0) == replace(other, lr=1.0)  # type: ignore[type-var]


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return each parameter group's settings that determine a step, as values that JSON has."""
    return [
        {
            name: _plain(value)
            for name, value in shared_entries(optimizer, group).items()
            if name not in _HOW | _SCHEDULE
        }
        for group in optimizer.param_groups
    ]


def shared_entries(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a parameter group that may matter on other ranks.

    The classes of torch.optim ignore all entries that are not among their settings; such an entry is the script's own.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return group
    known = optimizer.defaults.keys() | _HOW | _SCHEDULE
    return {name: value for name, value in group.items() if name in known}


def base_lr(optimizer: torch.optim.Optimizer) -> float:
    """Return the largest learning rate among the optimizer's parameter groups; NaN if no group has one."""
    return max((float(group["lr"]) for group in optimizer.param_groups if "lr" in group), default=math.nan)


def _grouped(optimizer: torch.optim.Optimizer, flat: FlatModule) -> TorchOptimizer:
    lr, groups = base_lr(optimizer), settings_of(optimizer)
    for settings in groups:
        settings["lr"] = float(f"{settings['lr'] / lr:.12g}") if lr else 1.0  # a schedule for all groups keeps ratios
    members = tuple(tuple(map(id, group["params"])) for group in optimizer.param_groups)
    if flat not in _spans or _spans[flat][0] != members:
        where = {parameter: number for number, own in enumerate(members) for parameter in own}
        spans: list[list[int]] = []
        for parameter, entry in zip(flat.parameters, flat.schema.entries, strict=True):
            if spans and spans[-1][2] == where[id(parameter)]:
                spans[-1][1] = entry.offset + entry.size
            else:
                spans.append([entry.offset, entry.offset + entry.size, where[id(parameter)]])
        _spans[flat] = members, json.dumps(spans)
    return TorchOptimizer(type(optimizer).__name__, json.dumps(groups), _spans[flat][1], lr)


_spans: weakref.WeakKeyDictionary[FlatModule, tuple[tuple[tuple[int, ...], ...], str]] = weakref.WeakKeyDictionary()
"""For each module, its parameters by group when last seen, and the spans computed from them."""


def _plain(value: Any) -> Any:
    """Return JSON's value of a setting, equal for equal settings; of another kind, the name of its class."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        value = value.reshape(-1)[:LONGEST].tolist()
        value = value[0] if len(value) == 1 else value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Rational):
        return float(value)
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return type(value).__name__
