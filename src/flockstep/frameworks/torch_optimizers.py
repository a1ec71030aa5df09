"""torch's optimisers as ours: the same class and hyper-parameters, or a refusal; nothing is guessed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flockstep.errors import ConfigurationError
from flockstep.optimizers.adagrad import Adagrad
from flockstep.optimizers.adam import Adam, AdamW
from flockstep.optimizers.base import Optimizer
from flockstep.optimizers.sgd import SGD

_HOW = {"params", "param_names", "foreach", "fused", "capturable", "differentiable", "initial_lr"}
"""Entries of a param group that say how a step is computed, not what it computes."""


@dataclass(frozen=True)
class _Rule:
    """Which of our classes a torch class is, the settings they share, and those that must have one value."""

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
    """Our optimiser of the same class with the same hyper-parameters; what it remembers of past steps stays behind.

    Raises:
        ConfigurationError: a class or a hyper-parameter that has no counterpart, or param groups that differ.
    """
    who = type(optimizer).__name__
    rule = _RULES.get(type(optimizer))
    if rule is None:
        known = ", ".join(kind.__name__ for kind in _RULES)
        raise ConfigurationError(
            f"the optimiser must be one of torch.optim's {known}, got {who}; use one of these, or a strategy whose "
            f"servers need no optimiser"
        )
    group = _one_group(optimizer, who)
    for name, value in group.items():
        if name in rule.must and value != rule.must[name]:
            raise ConfigurationError(
                f"{name} of {who} must be {rule.must[name]}, got {value!r}; leave it out (flockstep has no counterpart)"
            )
        if name not in {*rule.same, *rule.must, *_HOW, "betas"}:
            raise ConfigurationError(
                f"{who} has a setting {name}={value!r} that flockstep does not know; use a plain torch.optim.{who}"
            )
    values = {name: _plain(group[name]) for name in rule.same}
    return rule.build(**values, **rule.renamed(group))


def _one_group(optimizer: torch.optim.Optimizer, who: str) -> dict[str, Any]:
    """The param group that stands for all."""
    first: dict[str, Any] = optimizer.param_groups[0]
    for number, group in enumerate(optimizer.param_groups[1:], start=1):
        for name in sorted((first.keys() | group.keys()) - _HOW):
            if first.get(name) != group.get(name):
                raise ConfigurationError(
                    f"all param groups of {who} must have the same {name}, got {first.get(name)} in group 0 and "
                    f"{group.get(name)} in group {number}; pass all parameters in one group"
                )
    return first


def _plain(value: Any) -> Any:
    """A number for a tensor that holds one."""
    return value.item() if isinstance(value, torch.Tensor) else value
