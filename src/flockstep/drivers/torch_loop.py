"""`flockstep.distribute` for PyTorch: the user's optimiser, with a strategy in its `step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flockstep.arrays.schema import FlatArray
from flockstep.drivers.loop import Loop
from flockstep.drivers.torch_backward import Backward
from flockstep.drivers.torch_buffers import Buffers, Policy, all_packed, first_packed
from flockstep.errors import ConfigurationError
from flockstep.frameworks.torch_flat import FlatModule
from flockstep.frameworks.torch_optimizers import from_torch
from flockstep.optimizers.base import Optimizer
from flockstep.optimizers.sgd import SGD
from flockstep.strategies.base import Strategy


class _UserOptimizer:
    """The user's optimiser as a worker's stepper: the flat arrays are its parameters' and gradients' own memory."""

    def __init__(self, flat: FlatModule, optimizer: torch.optim.Optimizer):
        self._flat = flat
        self._optimizer = optimizer

    @property
    def lr(self) -> float:
        """The current learning rate of the first parameter group."""
        return float(self._optimizer.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = value

    def step(self, params: FlatArray, gradient: FlatArray) -> None:
        """Let the user's optimiser step, on `gradient`."""
        if gradient is not self._flat.grads:
            self._flat.grads[:] = gradient
        self._optimizer.step()

    def reset(self, params: FlatArray) -> None:
        """Let the user's optimizer begin anew: torch's make their state at the next step."""
        self._optimizer.state.clear()


class DistributedOptimizer(torch.optim.Optimizer):
    """The user's optimiser, whose `step` lets a strategy use the gradients; everything else is the original's."""

    def __init__(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy, buffers: Policy = "mean"
    ):
        # The base class is for isinstance alone (schedulers ask); groups and state are the original's.
        self.inner = optimizer
        self.flat = FlatModule(module)
        self.buffers = Buffers(module, buffers)
        _require_same_parameters(module, optimizer)
        server_side = strategy.traits.server_optimizer
        spec: Optimizer = from_torch(optimizer) if server_side else SGD(lr=1.0)
        stepper = _UserOptimizer(self.flat, optimizer)
        flat = self.flat
        self.loop = Loop(flat.params, flat.grads, flat.schema, strategy, stepper, spec, self.buffers.packed)
        if self.buffers:
            self.buffers.take(self.loop.exchange("buffers", lambda me: first_packed(me, self.buffers.packed())))
        self.flat.move_gradients(self.loop.gradients)
        self._backward = Backward(self.flat, self.loop)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The original's, live: schedulers change them."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The original's."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The original's."""
        return self.inner.defaults

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Hand the gradients of one mini-batch to the strategy; returns when the next can be computed.

        Raises:
            ConfigurationError: a closure is given, which would need several gradients per step.
            RunError: the run cannot go on.
        """
        if closure is not None:
            raise ConfigurationError("step(closure) needs several gradients per step; call step() without one")
        self._backward.check()
        self.flat.gather_gradients()
        self.loop.step()
        self._backward.begin()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zero the gradients in place: they live in one flat array, so `set_to_none` keeps them too."""
        self.flat.zero_grad()

    def finish(self) -> None:
        """End the run; afterwards the model holds the result, the same on every worker."""
        self._backward.end()
        self.loop.finish()
        self.buffers.take(self.loop.handed)
        self.loop.handed.clear()

    def sync_buffers(self) -> None:
        """Make the module's buffers equal on all ranks by the policy given to `distribute`; call it on every rank.

        Raises:
            ConfigurationError: the ranks' buffers differ in size, or the run has been finished.
        """
        if self.buffers:
            self.buffers.take(self.loop.exchange("buffers", lambda me: all_packed(me, self.buffers.packed())))

    def state_dict(self) -> dict[str, Any]:
        """The original's."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the original."""
        self.inner.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.inner!r}, strategy={str(self.loop.strategy)!r})"


def _require_same_parameters(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in held:
            raise ConfigurationError(
                f"parameter {name} is trainable but the optimiser does not hold it; pass model.parameters() to the "
                "optimiser, or freeze it with requires_grad_(False)"
            )
