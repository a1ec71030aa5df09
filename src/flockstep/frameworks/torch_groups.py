"""torch's elementwise optimizers as flockstep optimizers, with parameter groups, on any slice of the parameters."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from flockstep.arrays.namespace import as_tensor, copied, to_host
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, require
from flockstep.optimizers.base import Optimizer, OptimizerState

if TYPE_CHECKING:
    import torch

ELEMENTWISE = (
    *("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta"),
    *("Adamax", "NAdam", "RAdam", "ASGD", "Rprop"),
)
"""Names of the classes of torch.optim that step every element independently."""
LINEAR = ("SGD", "ASGD")
"""Classes whose step is linear in gradient and weight decay; others hardly depend on the gradient's scale."""
PER_STEP = ("lr_decay", "momentum_decay", "lambd")
"""Names of the settings that torch multiplies by the number of steps."""
DECAYS = dict.fromkeys(LINEAR, ("weight_decay",))
"""Class → names of the settings that scale with the gradient, not with the learning rate."""
FACTORS = {"RMSprop": ("alpha",), "Adadelta": ("rho",)}
"""Class → names of the settings that are factors of running means, in addition to `betas`."""
SUMS = {"momentum_buffer", "sum"}
"""Names of torch's state variables that are sums over past steps, rather than means."""
NUMBERS = ("mu_product", "eta", "mu")
"""Names of torch's state variables that consist of one number per parameter, in addition to the number of steps."""


@dataclass(eq=False)
class Pieces:
    """The state of the torch optimizer for one slice of the parameters; empty before its first step."""

    ranges: list[tuple[int, int, int]] = field(default_factory=list)
    """First element, end (exclusive) and group of each parameter that the torch optimizer has."""
    own: list[dict[str, Any]] = field(default_factory=list)
    """torch's state variables of each of these parameters; the torch optimizer writes to these dicts."""


_optimizers: WeakKeyDictionary[Pieces, torch.optim.Optimizer] = WeakKeyDictionary()
"""The torch optimizer of each state; a state that a checkpoint has restored gets a new one."""


@dataclass(frozen=True)
class TorchOptimizer(Optimizer):
    """An optimizer of torch.optim, the class `kind`, with the parameter groups of a script's optimizer.

    `groups` holds the settings of each group as JSON, where `lr` is a multiple of the step's learning rate; `spans`
    assigns the elements of the flat array to groups, as JSON triples [start, stop, group].
    """

    kind: str = "SGD"
    groups: str = "[{}]"
    spans: str = "[]"
    lr: float = 0.01

    def __post_init__(self) -> None:
        require(self.lr >= 0, "lr of torch", ">= 0", self.lr, "use for example 0.1")
        if self.kind not in ELEMENTWISE:
            raise ConfigurationError(
                f"kind of torch must be one of {', '.join(ELEMENTWISE)}, got {self.kind}; choose an optimizer that "
                "acts element by element"
            )

    @property
    def by_place(self) -> bool:
        return len(json.loads(self.groups)) > 1

    def load(self) -> None:
        """Import torch, which takes seconds, so that the first step does not wait for the import."""
        import torch  # noqa: F401

    def init(self, params: FlatArray) -> OptimizerState:
        """Return an empty state, which torch fills at the first step."""
        return OptimizerState(foreign=Pieces())

    def step(
        self, params: FlatArray, gradient: FlatArray, state: OptimizerState, lr: float, share: float = 1.0
    ) -> None:
        held: Pieces = state.foreign
        settings = json.loads(self.groups)
        if not len(params):  # with fewer parameters than slices
            state.steps += share
            return
        optimizer = self._optimizer(held, params, state.start)
        if self.kind in LINEAR:
            gradient = gradient if share == 1 else gradient * share
        else:
            lr *= (
                math.sqrt(share) if self.kind == "Adagrad" else share
            )  # the sum of squares contributes the other square root
        for (start, stop, number), group in zip(held.ranges, optimizer.param_groups, strict=True):
            rate = lr * settings[number].get("lr", 1.0)
            group.update(self._settings({**optimizer.defaults, **settings[number]}, share), lr=rate)
            parameter = group["params"][0]
            parameter.data = as_tensor(params[start:stop])
            parameter.grad = as_tensor(gradient[start:stop])
        for own in held.own:
            if "step" in own:
                own["step"].fill_(state.steps / share)
        self._scale(held, 1 / share)
        optimizer.step()
        self._scale(held, share)
        state.steps += share

    def remembered(self, state: OptimizerState) -> OptimizerState:
        """Return the state under torch's names: arrays, zero for groups without, and numbers of each group."""
        found = OptimizerState(state.steps)
        size = state.foreign.ranges[-1][1] if state.foreign.ranges else 0
        for part, group, own in self._own(state.foreign):
            for name, value in own.items():
                if name in NUMBERS:
                    found.numbers[f"{name}:{group}"] = float(value)
                elif name != "step" and value is not None:
                    array = to_host(value)
                    found.slots.setdefault(name, np.zeros(size, array.dtype))[part] = array
        return found

    def recall(self, params: FlatArray, state: OptimizerState, given: OptimizerState) -> None:
        """Set the state of a new torch optimizer to the given arrays and scalars."""
        import torch

        state.steps, state.foreign = given.steps, Pieces()
        self._optimizer(state.foreign, params, state.start)
        for part, group, own in self._own(state.foreign):
            own.update({name: as_tensor(copied(slot[part])) for name, slot in given.slots.items()})
            for key, value in given.numbers.items():
                name, _, of = key.partition(":")
                if int(of) == group:
                    own[name] = torch.tensor(value)
            if self.kind != "SGD":
                own["step"] = torch.tensor(float(given.steps))

    def _optimizer(self, held: Pieces, params: FlatArray, start: int) -> torch.optim.Optimizer:
        """Return the torch optimizer for a slice of the parameters that begins at element `start`."""
        import torch

        if held in _optimizers:
            return _optimizers[held]
        settings, size = json.loads(self.groups), len(params)
        cut = (
            (max(a - start, 0), min(b - start, size), group)
            for a, b, group in json.loads(self.spans) or [[start, start + size, 0]]
        )
        held.ranges = [(a, b, group) for a, b, group in cut if a < b]
        held.own = held.own or [{} for _ in held.ranges]
        chosen = [
            {"params": [torch.nn.Parameter(as_tensor(params[a:b]))], **settings[g], "lr": 1.0}
            for a, b, g in held.ranges
        ]
        made: torch.optim.Optimizer = getattr(torch.optim, self.kind)(chosen)
        for group, own in zip(made.param_groups, held.own, strict=True):
            own.update({**made.state[group["params"][0]], **own})  # some classes fill their state when they are made
            made.state[group["params"][0]] = own
        _optimizers[held] = made
        return made

    def _own(self, held: Pieces) -> Iterator[tuple[slice, int, dict[str, Any]]]:
        """Yield for each piece its slice, its group, and torch's state of it."""
        for (start, stop, group), own in zip(held.ranges, held.own, strict=True):
            yield slice(start, stop), group, own

    def _settings(self, whole: dict[str, Any], share: float) -> dict[str, Any]:
        """Return a group's settings for a share of a step: running means keep the share-th power of their factors."""
        changed = {name: whole[name] * share for name in (*PER_STEP, *DECAYS.get(self.kind, ())) if name in whole}
        changed.update({name: whole[name] ** share for name in FACTORS.get(self.kind, ())})
        if "betas" in whole:
            changed["betas"] = tuple(beta**share for beta in whole["betas"])
        return {**whole, **changed}

    def _scale(self, held: Pieces, by: float) -> None:
        """Multiply the sums in torch's state, so that a step between two calls adds only its share to them."""
        if by == 1 or self.kind in LINEAR:
            return
        for own in held.own:
            for name in SUMS & own.keys():
                own[name].mul_(by)
