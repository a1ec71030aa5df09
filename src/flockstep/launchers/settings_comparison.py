"""Compares the settings of the optimizers of a launched script's workers, step by step.

Workers report the settings at `distribute` and then every few steps, and never wait for the comparison. Only settings
of equal steps are compared, because a schedule may change settings at every step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flockstep.errors import ConfigurationError
from flockstep.launchers.wait_monitor import on_stderr
from flockstep.messages import Address, Message
from flockstep.strategies.base import Strategy

KEPT = 64
"""Number of steps whose settings are kept for workers that have not yet reached these steps."""
SAME_OPTIMIZER = "give all workers the same optimizer, and if one loads a saved state, let all of them load it"
EQUAL_VALUES = (
    "let schedules depend only on values that are equal on all workers, such as a loss that is evaluated inside of "
    "optimizer.consensus()"
)
"""Ways out for settings that differ at the start, and that have parted."""
Difference = tuple[str, Any, Any]
"""Name of a setting, and its values on two workers."""


@dataclass
class SettingsComparison:
    """Settings that the workers of a script have reported, by step."""

    workers: int
    strategy: Callable[[], Strategy | None]
    shown: dict[tuple[int, int], dict[Address, tuple[bytes, bool]]] = field(default_factory=dict)
    """(1 if at `distribute`, step) → worker → its settings, and whether it has loaded a state."""
    apart: bool = False
    """Whether settings that may differ have differed at the start, or the difference has been reported."""

    def hear(self, message: Message) -> None:
        """Store a worker's settings of a step, and compare them with those of the other workers.

        Settings may differ if each worker steps with its own gradient; if they part in the course of the run, standard
        error says so once. Learning rates may also differ if servers apply each gradient alone, at the learning rate
        that its worker sends with it. At the start, a worker without a loaded state takes the settings that the worker
        of the lowest rank has loaded.

        Raises:
            ConfigurationError: a setting differs that must be equal.
        """
        note, strategy = message.note, self.strategy()
        step, start = int(note["step"]), bool(note["start"])
        here = self.shown.setdefault((int(start), step), {})
        here[message.source] = message.payload.tobytes(), bool(note["loaded"])
        if strategy is None or (start and len(here) < self.workers):
            return
        root = min(here)
        for rank in sorted(here):
            (ours, loaded), (theirs, loads) = here[root], here[rank]
            if ours != theirs and not (loaded and not loads):
                self._compare(strategy, (root, ours), (rank, theirs), None if start else step, bool(note["ends"]))
        if len(here) == self.workers or len(self.shown) > KEPT:
            del self.shown[next(iter(self.shown)) if len(here) < self.workers else (int(start), step)]

    def _compare(
        self, strategy: Strategy, one: tuple[Address, bytes], other: tuple[Address, bytes], step: int | None, ends: bool
    ) -> None:
        (root, ours), (rank, theirs) = (one[0], json.loads(one[1])), (other[0], json.loads(other[1]))
        traits, where = strategy.traits, "" if step is None else f" at step {step}"
        found, must = None, traits.alike or traits.server_optimizer
        if must:
            found = _difference(_ratios(ours), _ratios(theirs)) if traits.own_rates else _difference(ours, theirs)
        if found is not None and ends:
            name, first, second = found
            raise ConfigurationError(
                f"{name} must be the same on all workers, because {_why(strategy)}, got {first} on worker {root} and "
                f"{second} on worker {rank}{where}; {SAME_OPTIMIZER if step is None else EQUAL_VALUES}, or use a "
                "strategy whose workers update their own parameters, such as local_sgd"
            )
        found = _difference(ours, theirs)
        if found is not None and step is not None and not self.apart:
            name, first, second = found
            on_stderr(
                f"{name} has changed to {first} on worker {root} and {second} on worker {rank}{where}; if this is not "
                f"meant, {EQUAL_VALUES}"
            )
        self.apart |= found is not None


def _difference(ours: list[Any], theirs: list[Any]) -> Difference | None:
    (kind, groups), (other, others) = ours, theirs
    if kind != other:
        return "the class of the optimizer", kind, other
    if len(groups) != len(others):
        return f"the number of parameter groups of {kind}", len(groups), len(others)
    for number, (a, b) in enumerate(zip(groups, others, strict=True)):
        for name in a | b:
            if a.get(name) != b.get(name):
                group = f" in group {number}" if len(groups) > 1 else ""
                return f"{name} of {kind}{group}", a.get(name), b.get(name)
    return None


def _ratios(settings: list[Any]) -> list[Any]:
    """The settings with each learning rate as a multiple of the largest one, which comes with every gradient."""
    kind, groups = settings
    largest = max((group["lr"] for group in groups if "lr" in group), default=0)
    ratios = [
        {"lr": float(f"{group['lr'] / largest:.12g}") if largest else 1.0} if "lr" in group else {} for group in groups
    ]
    return [kind, [group | ratio for group, ratio in zip(groups, ratios, strict=True)]]


def _why(strategy: Strategy) -> str:
    """Why the workers' settings must be equal."""
    if strategy.traits.alike:
        return f"all workers of {strategy} step along the same gradient"
    if strategy.traits.memory == "slices":
        return f"each worker of {strategy} updates a part of the common model"
    return f"the servers of {strategy} update the parameters for all workers"
