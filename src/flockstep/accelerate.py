"""flockstep for Accelerate: an `Accelerator` whose optimizers are coordinated by a strategy of flockstep."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flockstep.errors import ConfigurationError, MissingDependency

try:
    import accelerate
    from accelerate.optimizer import AcceleratedOptimizer
    from torch import nn, tensor
except ModuleNotFoundError as error:
    raise MissingDependency.of(str(error.name), "transformers", "flockstep.accelerate") from error

from flockstep.runtime import torch_parts
from flockstep.runtime.torch_clipping import clip_grad_norm_, clip_values
from flockstep.runtime.torch_loop import DistributedOptimizer
from flockstep.runtime.torch_parts import Coordinated
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    import torch

    from flockstep.runtime.torch_buffers import Policy

__all__ = ["FlockstepAccelerator", "open_group"]


def open_group() -> None:
    """Open the process group in which Accelerate exchanges metrics and decisions; gradients go through the strategy.

    Call `open_group` before the script makes its `TrainingArguments`, which would look for an address that a run of
    flockstep does not have. `FlockstepAccelerator` calls `open_group` by itself.

    Raises:
        ConfigurationError: the open group has ranks other than those of the run, or the workers are on several hosts
            and MASTER_ADDR is not set.
    """
    torch_parts.open_group("Accelerate")


class FlockstepAccelerator(Coordinated, accelerate.Accelerator):  # type: ignore[misc]
    """An `Accelerator` whose `prepare` lets a strategy of flockstep coordinate the optimizers; Accelerate's own
    `prepare` would wrap the models in DistributedDataParallel.

    Call `finish()` after the last step.
    """

    framework = "Accelerate"

    def __init__(self, strategy: str | Strategy, *, buffers: Policy = "mean", timeout: float = 600.0, **options: Any):
        """Open the process group, and make the `Accelerator`.

        Args:
            strategy: an expression such as "local_sgd(period=32)", or a strategy object.
            buffers: as in `flockstep.distribute`.
            timeout: as in `flockstep.distribute`.
            options: the arguments of `Accelerator`, which refuses others.
        """
        open_group()
        super().__init__(**options)
        self.coordinate(strategy, buffers, timeout)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare objects as `Accelerator.prepare` does, with models before optimizers, whatever the order of the
        arguments.
        """
        for number, each in enumerate(args):
            if isinstance(each, nn.Module):
                self.prepare_model(each, device_placement[number] if device_placement else None)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Move a model to its device and prepare it for mixed precision and compilation; unlike Accelerate, do not wrap
        the model in DistributedDataParallel.
        """
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Let the strategy coordinate an optimizer whose models have already been prepared."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        return super().prepare_optimizer(self._distribute(self._models, optimizer), device_placement=False)

    def plain(self, optimizer: Any) -> Any:
        """Return the optimizer that the script gave to `prepare`, without the strategy."""
        while isinstance(optimizer, AcceleratedOptimizer | DistributedOptimizer):
            optimizer = optimizer.inner if isinstance(optimizer, DistributedOptimizer) else optimizer.optimizer
        return optimizer

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context manager in which backward passes only add to the gradients, without an exchange."""
        return self._accumulating()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip the gradient that the optimizer uses. With `max_norm` inf, the gradient does not change, and only its
        norm is computed.

        See `flockstep.clip_grad_norm_`.
        """
        self.unscale_gradients()
        if math.isinf(max_norm) and self.coordination.traits.clips == "none":
            return tensor(math.nan)  # no node knows it
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each element of the gradients to [-clip_value, clip_value], if the strategy does not combine gradients.

        Raises:
            CompositionError: the strategy combines gradients after this call.
        """
        self.unscale_gradients()
        clip_values(parameters, clip_value, self.coordination)

    def wait_for_everyone(self) -> None:
        """Wait until every rank has called this method."""
        torch_parts.meet("Accelerate")
        super().wait_for_everyone()

    def gather(self, tensor: Any) -> Any:
        """Gather tensors of all ranks, as `Accelerator.gather` does."""
        torch_parts.meet("Accelerate")
        return super().gather(tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine tensors of all ranks, as `Accelerator.reduce` does."""
        torch_parts.meet("Accelerate")
        return super().reduce(tensor, reduction, scale)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the state of the common model, for saving; every rank must call this method.

        The tensors are copies: the parameters share one memory, so safetensors would treat them as tied parameters.
        """
        with self.consensus():
            state: dict[str, Any] = super().get_state_dict(model, unwrap)
            return {name: each.clone() for name, each in state.items()}

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = False, **options: Any) -> str:
        """Save the common model and the optimizers' states, as `Accelerator.save_state` does; every rank must call this
        method.

        `load_state` cannot read files that were saved with `safe_serialization`.
        """
        with self.consensus():
            where: str = super().save_state(output_dir, safe_serialization, **options)
        return where

    def load_state(self, input_dir: str | None = None, **options: Any) -> None:
        """Load the files that `save_state` has saved, then copy rank 0's models and optimizers to all ranks; every rank
        must call this method.

        Raises:
            ConfigurationError: the models were saved with safetensors.
        """
        if input_dir is not None and any(Path(input_dir).glob("*.safetensors")):
            raise ConfigurationError(
                f"safetensors cannot load {input_dir} into prepared models, whose parameters are views of one array; "
                f"load the models before prepare(), or save with safe_serialization=False"
            )
        super().load_state(input_dir, **options)
        self.sync()

    def finish(self) -> None:
        """End the run; afterwards, every rank's models hold the result."""
        for each in self._live():
            each.finish()

    def end_training(self) -> None:
        """End the run and the experiment trackers."""
        self.finish()
        super().end_training()
