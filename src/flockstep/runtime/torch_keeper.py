"""Saves the state of a script's PyTorch objects in a checkpoint: optimizer, buffers and random streams."""

from __future__ import annotations

import random as standard
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flockstep.arrays.namespace import to_device_of
from flockstep.arrays.schema import FlatArray, Schema
from flockstep.errors import ConfigurationError, SchemaMismatch
from flockstep.expression import to_text
from flockstep.frameworks.shard_layout import ShardLayout
from flockstep.frameworks.torch_dtensors import box_of, local, placed_like
from flockstep.frameworks.torch_flat import FlatModule
from flockstep.optimizers.base import Optimizer
from flockstep.runtime.torch_buffers import Buffers


@dataclass
class OptimizerContent:
    """State of a torch optimizer in a checkpoint, without the optimizer's settings."""

    schema: Schema
    """Names and shapes of the parameters."""
    kind: str
    """Name of the optimizer's class."""
    states: list[dict[str, Any]]
    """State of each parameter in the order of the parameter groups; empty if servers run the optimizer."""
    rule: str
    """The optimizer in the form that servers execute, as text."""
    layout: ShardLayout | None = None
    """Place of the parameters' elements, which this process trains, in the whole model; None in older checkpoints."""


@dataclass
class BetweenSteps:
    """State in a checkpoint that a script may change between two steps: settings, buffers and random streams."""

    groups: list[dict[str, Any]]
    """Settings of each parameter group, such as the learning rate."""
    buffers: dict[str, torch.Tensor]
    torch_stream: torch.Tensor
    device_stream: torch.Tensor | None
    """State of the generator of the model's device; None on the CPU."""
    numpy_stream: dict[str, Any] | tuple[Any, ...]
    python_stream: tuple[Any, ...]


class TorchKeeper:
    """Saves and restores the state of a distributed optimizer."""

    def __init__(
        self,
        flat: FlatModule,
        optimizer: torch.optim.Optimizer,
        buffers: Buffers,
        server_side: bool,
        why_not: Callable[[], str],
        rule: Callable[[], Optimizer],
        newest: Callable[[int], int] | None = None,
    ):
        """`server_side`: servers step in place of the optimizer. `why_not`: returns the reason why the script cannot be
        stopped now. `rule`: returns the optimizer in the form that servers execute now. `newest`: returns the
        largest of a number over the processes of this replica, all of which call it at one point; None for one process.
        """
        self.newest = newest
        self._flat, self._optimizer, self._buffers, self._server_side = flat, optimizer, buffers, server_side
        self._why_not, self._rule = why_not, rule
        self._kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"

    @property
    def refusal(self) -> str:
        """Reason why the script cannot be stopped between two steps; empty if it can be stopped."""
        return self._why_not()

    def at_boundary(self) -> OptimizerContent:
        """Return the optimizer's state where the worker's program has stopped; tensors are not copied."""
        states = [] if self._server_side else [self._state(one) for one in self._parameters()]
        return OptimizerContent(self._flat.schema, self._kind, states, to_text(self._rule()), self.layout)

    @property
    def layout(self) -> ShardLayout:
        """The elements of the model that this process trains."""
        places = {id(parameter): index for index, parameter in enumerate(self._flat.parameters)}
        order = tuple(places.get(id(parameter), -1) for parameter in self._parameters())
        boxes = tuple(map(box_of, self._flat.parameters))
        return ShardLayout(self._flat.schema, boxes, tuple(self._flat.trained), order)

    def restore_at_boundary(self, kept: OptimizerContent) -> None:
        """Restore the optimizer's state; raise `ConfigurationError` for another model's or optimizer's."""
        try:
            kept.schema.require(self._flat.schema, "the script")
        except SchemaMismatch as error:
            what = str(error).partition(": ")[2].partition(";")[0] or str(error).partition(";")[0]
            raise ConfigurationError(
                f"the script's model differs from the model of the checkpoint: {what}; restore the script as it was"
            ) from None
        if kept.layout is not None and kept.layout != self.layout:
            raise ConfigurationError(
                "the script shards its model in another way than the script that wrote the checkpoint; restore the "
                "script as it was"
            )
        count = 0 if self._server_side else len(self._parameters())
        if kept.kind != self._kind or len(kept.states) != count:
            raise ConfigurationError(
                f"the checkpoint holds the state of {kept.kind} over {len(kept.states)} parameters, the script has "
                f"{self._kind} over {count}; restore the script as it was"
            )
        for parameter, state in zip(self._parameters(), kept.states, strict=False):
            self._optimizer.state.pop(parameter, None)
            if state:
                self._optimizer.state[parameter] = placed_like(parameter, state)

    def take(self, params: FlatArray, kept: OptimizerContent) -> None:
        """Take the parameters (K,) and the state of the optimizer of another worker, whose replica is equal."""
        self._flat.params[:] = to_device_of(params, self._flat.params)
        self._flat.write_parameters()
        self.restore_at_boundary(kept)

    def move_gradients(self, home: FlatArray) -> None:
        """Move the gradients, as far as a backward pass has computed them, to the array `home` (K,)."""
        self._flat.return_gradients()
        without = [parameter for parameter in self._flat.parameters if parameter.grad is None]
        self._flat.move_gradients(home)
        for parameter in without:
            parameter.grad = None

    def between_steps(self) -> BetweenSteps:
        """Return the optimizer's settings, the buffers and the random streams; tensors are not copied."""
        groups = [{name: v for name, v in group.items() if name != "params"} for group in self._optimizer.param_groups]
        device = self._flat.parameters[0].device
        return BetweenSteps(
            groups,
            self._buffers.values(),
            torch.get_rng_state(),
            torch.get_device_module(device).get_rng_state(device) if device.type != "cpu" else None,
            np.random.get_state(),  # noqa: NPY002 - the stream that scripts use
            standard.getstate(),
        )

    def restore_between_steps(self, kept: BetweenSteps, random: bool) -> None:
        """Restore the optimizer's settings and the buffers, and the random streams if `random` is set; raise
        `ConfigurationError` if the optimizer has other groups, or the model other buffers.
        """
        own = self._optimizer.param_groups
        if len(own) != len(kept.groups):
            raise ConfigurationError(
                f"the checkpoint holds {len(kept.groups)} groups of parameters, the script's optimizer has {len(own)}; "
                "restore the script as it was"
            )
        for group, settings in zip(own, kept.groups, strict=True):
            group.update(settings)
        self._buffers.restore_values(kept.buffers)
        if random:
            torch.set_rng_state(kept.torch_stream)
            if kept.device_stream is not None:
                device = self._flat.parameters[0].device
                torch.get_device_module(device).set_rng_state(kept.device_stream, device)
            np.random.set_state(kept.numpy_stream)  # noqa: NPY002 - the stream that scripts use
            standard.setstate(kept.python_stream)

    def _state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The optimizer's state of a parameter, of DTensors the shards of this process."""
        found = {name: local(value) for name, value in self._optimizer.state.get(parameter, {}).items()}
        for name, value in self._optimizer.state.get(parameter, {}).items():
            if found[name] is not value and not _has_shape(found[name], local(parameter)):
                raise ConfigurationError(
                    f"the state {name} of {self._kind} is a DTensor of another shape than its parameter; use an "
                    "optimizer whose state has the shape of the parameters, such as torch.optim.AdamW"
                )
        return found

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]


def _has_shape(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape
