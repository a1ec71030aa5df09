"""flockstep for Lightning: a strategy of flockstep as the strategy of a Lightning `Trainer` or `Fabric`.

The module works with the package `lightning` if it is installed, otherwise with `pytorch_lightning`. If both are
installed, a script that uses `pytorch_lightning` must import it before this module.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from flockstep.errors import CompositionError, ConfigurationError, MissingDependency

_OLD = bool({"pytorch_lightning", "lightning_fabric"} & set(sys.modules)) and "lightning" not in sys.modules
_TRAINER, _FABRIC = ("lightning.pytorch", "lightning.fabric")
if _OLD or find_spec("lightning") is None:
    _TRAINER, _FABRIC = ("pytorch_lightning", "lightning_fabric")
if find_spec(_TRAINER.partition(".")[0]) is None:
    raise MissingDependency.of("Lightning", "lightning", "flockstep.lightning")
_trainer: Any = import_module(f"{_TRAINER}.strategies")
_fabric: Any = import_module(f"{_FABRIC}.strategies")
_environments: Any = import_module(f"{_FABRIC}.plugins.environments")
_synchronized: Any = import_module(f"{_FABRIC}.utilities.distributed")._sync_ddp_if_available

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from flockstep.runtime.node_spec import place_of_script  # noqa: E402
from flockstep.runtime.torch_clipping import clip_grad_norm_, clip_values  # noqa: E402
from flockstep.runtime.torch_parts import (  # noqa: E402
    Coordinated,
    broadcast_value,
    meet,
    open_group,
    place_on_host,
)
from flockstep.strategies.base import Strategy  # noqa: E402

if TYPE_CHECKING:
    from flockstep.runtime.torch_buffers import Policy

__all__ = ["FlockstepEnvironment", "FlockstepFabricStrategy", "FlockstepStrategy"]


class FlockstepEnvironment(_environments.ClusterEnvironment):  # type: ignore[misc]
    """Lightning's cluster environment in a run of flockstep, whose workers exist already."""

    @property
    def creates_processes_externally(self) -> bool:
        """Return True, because `flockstep launch`, torchrun, mpirun or srun has started the processes."""
        return True

    @property
    def main_address(self) -> str:
        """Address of rank 0's host, if the launcher has set MASTER_ADDR."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """Port for torch.distributed on rank 0's host, if the launcher has set it; otherwise 0."""
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        """Return False, because Lightning should use this environment only if a strategy names it."""
        return False

    def world_size(self) -> int:
        """Number of workers in the run."""
        return place_of_script()[1]

    def set_world_size(self, size: int) -> None:
        """Do nothing, because the launcher decides the number of workers."""

    def global_rank(self) -> int:
        """Rank of this worker, from 0."""
        return place_of_script()[0]

    def set_global_rank(self, rank: int) -> None:
        """Do nothing, because the launcher decides the ranks."""

    def local_rank(self) -> int:
        """Index of this worker among the workers of its host, from 0."""
        return place_on_host()[0]

    def node_rank(self) -> int:
        """Index of this worker's host, from 0, if all hosts have the same number of workers."""
        return place_of_script()[0] // place_on_host()[1]


class _Ranks(Coordinated):
    """What both strategies share: the ranks, their device, their exchanges, and the distributed optimizers."""

    framework = "Lightning"
    root: str
    parallel_devices: list[torch.device] | None

    @property
    def root_device(self) -> torch.device:
        """Device of this worker: its host's workers take the devices in turn."""
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[place_on_host()[0] % len(devices)]

    @property
    def is_distributed(self) -> bool:
        """Whether loaders need a sampler that gives each rank its part."""
        return place_of_script()[1] > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Number of parts of the data, and which of them this rank reads."""
        return {"num_replicas": place_of_script()[1], "rank": place_of_script()[0]}

    def setup_environment(self) -> None:
        """Open the process group in which Lightning exchanges metrics and decisions."""
        super().setup_environment()  # type: ignore[misc]
        open_group("Lightning")

    def _configure_launcher(self) -> None:
        """Refuse a number of devices that would stand for a number of processes; no launcher is needed."""
        devices, here = len(self.parallel_devices or [""]), place_on_host()[1]
        if devices not in (1, here):
            raise ConfigurationError(
                f"devices={devices} means {devices} processes of this host, but the run has {here} processes here; "
                f"leave devices out, and start the script with flockstep launch -n {devices}"
            )

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank has called this."""
        if dist.is_initialized():
            meet("Lightning")
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of rank `src`: text, numbers, None, or lists and dicts of these."""
        return broadcast_value(obj, src, "Lightning")

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Combine the tensors of all ranks; other values are returned unchanged."""
        if not isinstance(tensor, torch.Tensor) or not dist.is_initialized():
            return tensor
        meet("Lightning")
        return _synchronized(tensor, group, reduce_op=reduce_op)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Tensors of all ranks, stacked in the order of the ranks."""
        if dist.is_initialized():
            meet("Lightning")
        gathered: torch.Tensor = super().all_gather(tensor, group, sync_grads)  # type: ignore[misc]
        return gathered

    def _common_state(self, module: nn.Module) -> dict[str, Any]:
        """State of the common model; every rank calls this."""
        if not self._live():
            return module.state_dict()
        with self.consensus():
            state = module.state_dict()
            return {name: each.clone() if torch.is_tensor(each) else each for name, each in state.items()}

    def _state_of(self, optimizer: Any) -> dict[str, Any]:
        """State of an optimizer; that of servers only on rank 0, which writes it."""
        if self.coordination.traits.server_optimizer and place_of_script()[0] > 0:
            return {}
        state: dict[str, Any] = optimizer.state_dict()
        return state

    def _require_unscaled(self, precision: Any) -> None:
        """Raise `CompositionError` if a norm would be taken of gradients that a scaler has enlarged."""
        if getattr(precision, "scaler", None) is not None and self.coordination.traits.clips == "own":
            raise CompositionError(
                f"{self.coordination} clips each rank's own gradient before step() unscales it, got precision "
                "16-mixed; use bf16-mixed, or a strategy that combines gradients, such as all_reduce"
            )


class FlockstepStrategy(_Ranks, _trainer.ParallelStrategy):  # type: ignore[misc]
    """A strategy of flockstep for a `Trainer`, in a script that `flockstep launch` starts.

    Validation and checkpoints use the common model. Each `fit` is one run, after which every rank holds the result.
    """

    def __init__(self, strategy: str | Strategy, *, buffers: Policy = "mean", timeout: float = 600.0):
        """Read the strategy; nothing starts before `fit`.

        Args:
            strategy: an expression such as "local_sgd(period=32)", or a strategy object.
            buffers: as in `flockstep.distribute`.
            timeout: as in `flockstep.distribute`.

        Raises:
            ConfigurationError: the strategy is none.
        """
        super().__init__(cluster_environment=FlockstepEnvironment())
        self.coordinate(strategy, buffers, timeout)
        self._validating = ExitStack()

    def setup(self, trainer: Any) -> None:
        """Move the model to its device. Before a fit, also let flockstep's strategy coordinate the optimizers."""
        if self._layer_sync is not None:
            raise ConfigurationError(
                "sync_batchnorm=True needs sums during a forward pass, but strategies exchange data only between "
                "steps; leave sync_batchnorm out: buffers='mean' averages the statistics of all ranks for "
                "validation and for the result"
            )
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Move the module to this rank's device."""
        self.model.to(self.root_device)

    def setup_optimizers(self, trainer: Any) -> None:
        """Let the strategy coordinate each optimizer that `configure_optimizers` returns."""
        super().setup_optimizers(trainer)
        plain = super().optimizers
        self.optimizers = [self._distribute([self.lightning_module], each) for each in plain]

    def setup_precision_plugin(self) -> None:
        """Make Lightning clip the gradients that the optimizer uses, not those that the backward pass left."""
        super().setup_precision_plugin()
        self.precision_plugin.clip_gradients = self._clip_gradients

    def _clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: str | None = "norm"
    ) -> None:
        if clip_val <= 0:
            return
        if gradient_clip_algorithm == "value":
            clip_values(self.precision_plugin.main_params(optimizer), clip_val, self.coordination)
        else:
            self._require_unscaled(self.precision_plugin)
            clip_grad_norm_(optimizer, clip_val)

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Return a context manager in which backward passes only add to the gradients, without an exchange."""
        return self._accumulating()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the common model, for saving; every rank must call this method."""
        return self._common_state(self.lightning_module)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimizer, for saving. The state of the servers' optimizers is on rank 0 only."""
        return self._state_of(optimizer)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the optimizer states of a checkpoint, then copy rank 0's states to all ranks."""
        super().load_optimizer_state_dict(checkpoint)
        self.sync()

    def on_validation_start(self) -> None:
        """Set the module to the common model of all ranks for the validation, and for checkpoints at its end."""
        self._validating.enter_context(self.consensus())

    def on_validation_end(self) -> None:
        """Put this rank's replica back into the module."""
        self._validating.close()

    def on_train_end(self) -> None:
        """End the run that belongs to this fit."""
        for each in self._live():
            if place_of_script()[0] == 0:
                each.state_dict()  # of servers, for a checkpoint after the fit
            each.finish()


class FlockstepFabricStrategy(_Ranks, _fabric.ParallelStrategy, _fabric.strategy._BackwardSyncControl):  # type: ignore[misc]
    """A strategy of flockstep for a `Fabric`, in a script that `flockstep launch` starts.

    `fabric.setup` returns optimizers with the methods of optimizers from `flockstep.distribute`: call `finish()` after
    the last step. `fabric.save` writes the common model.
    """

    def __init__(self, strategy: str | Strategy, *, buffers: Policy = "mean", timeout: float = 600.0):
        """Read the strategy; see `FlockstepStrategy`."""
        super().__init__(cluster_environment=FlockstepEnvironment())
        self.coordinate(strategy, buffers, timeout)
        self._modules: list[nn.Module] = []
        self._backward_sync_control = self

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Return a context manager in which backward passes only add to the gradients, if `enabled`."""
        return self._accumulating() if enabled else nullcontext()

    def module_to_device(self, module: nn.Module) -> None:
        """Move a module to this rank's device."""
        module.to(self.root_device)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Store the module, so that its optimizers can be set up later."""
        self._modules.append(module)
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let the strategy coordinate the optimizer of one or several modules that `setup_module` has stored."""
        return self._distribute(self._modules, optimizer)

    all_reduce = _Ranks.reduce

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip the gradient that the optimizer uses, as `flockstep.clip_grad_norm_` does."""
        self._require_unscaled(self.precision)
        return clip_grad_norm_(optimizer, max_norm, norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        """Clip each element of the gradients, if the strategy does not combine gradients."""
        clip_values(self.precision.main_params(optimizer), clip_val, self.coordination)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the state of the common model, for saving; every rank must call this method."""
        return self._common_state(module)

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimizer, for saving. The state of the servers' optimizers is on rank 0 only."""
        return self._state_of(optimizer)

    def load_checkpoint(self, path: Any, state: Any = None, **options: Any) -> dict[str, Any]:
        """Load a checkpoint into modules and optimizers on every rank, then copy the state of rank 0 to all ranks."""
        remainder: dict[str, Any] = super().load_checkpoint(path, state, **options)
        self.sync()
        return remainder
