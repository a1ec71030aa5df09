"""What the adapters of Lightning and Accelerate need: each of several optimizers is distributed with the part of a
module that it trains, and the default process group of torch.distributed carries metrics and decisions.

Gradients and parameters are exchanged by a strategy, not in this group.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from flockstep.errors import CompositionError, ConfigurationError
from flockstep.links.process_groups import FOREVER, private_store
from flockstep.runtime.node_spec import enter_run, joining_run, place_of_script, strategy_of_run
from flockstep.runtime.place import place_from
from flockstep.runtime.session import barrier, sessions_here, works_between_steps
from flockstep.runtime.torch_buffers import Policy
from flockstep.runtime.torch_loop import DistributedOptimizer
from flockstep.strategies.base import Strategy

T = TypeVar("T")


class Coordinated:
    """What the classes for Lightning and Accelerate share: the optimizers that one strategy coordinates."""

    framework: str

    def coordinate(self, strategy: str | Strategy, buffers: Policy, timeout: float) -> None:
        """Set the strategy of optimizers prepared from now on. The arguments are those of `flockstep.distribute`."""
        self.coordination = strategy_of_run(strategy)
        self._settings = buffers, timeout
        self.distributed: list[DistributedOptimizer] = []
        """The optimizers of flockstep, one for each of the script's."""

    def _distribute(self, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> DistributedOptimizer:
        made = distribute_part(modules, optimizer, self.coordination, *self._settings)
        self.distributed = [*self._live(), made]
        meet(self.framework)  # refuses strategies that the framework's waits would stop
        return made

    def _live(self) -> list[DistributedOptimizer]:
        """The optimizers whose runs go on."""
        return [each for each in self.distributed if not each.loop.finished]

    def consensus(self) -> AbstractContextManager[None]:
        """Return a context manager in which the models hold the common model, equal on every rank; every rank must
        enter the context.

        Use it to evaluate and to save during training. At the end of the run the context manager does nothing.
        """
        return self._together(DistributedOptimizer.consensus)

    def _accumulating(self) -> AbstractContextManager[None]:
        """Context manager in which backward passes only add to the gradients, without an exchange."""
        return self._together(DistributedOptimizer.no_sync)

    @contextmanager
    def _together(self, context: Callable[[DistributedOptimizer], AbstractContextManager[None]]) -> Iterator[None]:
        with ExitStack() as stack:
            for each in self._live():
                stack.enter_context(context(each))
            yield

    def sync(self) -> None:
        """Copy rank 0's models and optimizers, which the script has loaded, to all ranks; every rank calls this."""
        for each in self._live():
            each.sync()


def distribute_part(
    modules: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    buffers: Policy = "mean",
    timeout: float = 600.0,
) -> DistributedOptimizer:
    """Call `flockstep.distribute` for the part of `modules` that `optimizer` trains; raise `ConfigurationError` if the
    optimizer holds no parameters of the modules, or only some parameters of a layer.
    """
    with joining_run("distribute", timeout):
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        found = [each for each in modules if held & {id(p) for p in each.parameters()}]
        if not found:
            raise ConfigurationError(
                "the optimizer's parameters belong to no module that has been set up; set up the module before its "
                "optimizer, or both in one call"
            )
        module = found[0] if len(found) == 1 else nn.ModuleList(found)
        return DistributedOptimizer(part_of(module, optimizer), optimizer, strategy, buffers)


def part_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    """Return the part of `module` whose trainable parameters are those of `optimizer`: the module itself, one of its
    submodules, or a `ModuleList` of several. Raise `ConfigurationError` if the optimizer holds some, but not all,
    parameters of a module without submodules.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    named = dict(module.named_parameters())
    others = [name for name, p in named.items() if p.requires_grad and id(p) not in held]
    if not others:
        return module
    parts = list(_whole_parts(module, held))
    reached = {id(p) for part in parts for p in part.parameters()}
    torn = [name for name, p in named.items() if id(p) in held - reached]
    if torn or not parts:
        raise ConfigurationError(
            f"an optimizer must hold all trainable parameters of the module or of some of its submodules, got one that "
            f"holds {', '.join(torn[:1]) or 'none of them'} but not {others[0]}; make a submodule of what each "
            f"optimizer trains, or freeze the rest with requires_grad_(False)"
        )
    return parts[0] if len(parts) == 1 else nn.ModuleList(parts)


def _whole_parts(module: nn.Module, held: set[int]) -> Iterator[nn.Module]:
    """The largest submodules that train held parameters alone."""
    for child in module.children():
        trained = {id(p) for p in child.parameters() if p.requires_grad}
        if trained and trained <= held:
            yield child
        elif trained & held:
            yield from _whole_parts(child, held)


def open_group(framework: str) -> None:
    """Open the default process group of all workers, with gloo; do nothing if the script has opened a group or runs
    alone.

    The group's connections stay within the host. Under torchrun, or wherever the script has set MASTER_ADDR and
    MASTER_PORT, the group meets at that address.

    Raises:
        ConfigurationError: the open group has other ranks than the run, or the workers are on several hosts and
            MASTER_ADDR and MASTER_PORT are not set.
    """
    rank, workers = place_of_script()
    if workers == 1:
        return
    if not dist.is_initialized():
        _open(framework, rank, workers)
    found = dist.get_rank(), dist.get_world_size()
    if found != (rank, workers):
        raise ConfigurationError(
            f"{framework} needs a process group with the run's ranks, got rank {found[0]} of {found[1]} in worker "
            f"{rank} of {workers}; pass flockstep.rank() and flockstep.workers() to init_process_group"
        )


def _open(framework: str, rank: int, workers: int) -> None:
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group("gloo", rank=rank, world_size=workers, timeout=FOREVER)
        return
    node_spec = enter_run()
    assert node_spec is not None
    if place_on_host()[1] != workers:
        raise ConfigurationError(
            f"{framework} exchanges metrics through torch.distributed, whose address is not known in a run over "
            f"several hosts; set MASTER_ADDR and MASTER_PORT to rank 0's host and a free port there, or start the "
            f"script with torchrun"
        )
    file = Path(node_spec.record) / f".torch-script-{node_spec.run}"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the only way to say that no other host may connect
    dist.init_process_group("gloo", store=private_store(file), rank=rank, world_size=workers, timeout=FOREVER)
    if rank == 0:
        atexit.register(file.unlink, missing_ok=True)


def place_on_host() -> tuple[int, int]:
    """Return the index of this process among the workers of its host, and the number of these workers."""
    if "LOCAL_WORLD_SIZE" in os.environ:  # as flockstep launch and torchrun say it
        return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ["LOCAL_WORLD_SIZE"])
    place = place_from(os.environ)
    return (0, 1) if place is None else (place.local_rank, place.local_workers)


def meet(framework: str) -> None:
    """Wait for all ranks before an operation of torch's process group, because a process in such an operation serves no
    other worker; raise `CompositionError` if the strategy's workers serve each other between two steps.
    """
    if works_between_steps():
        raise CompositionError(
            f"{framework} lets ranks wait for each other between two steps, got a strategy whose workers serve each "
            "other at that time; use a strategy without background tasks, such as all_reduce, ps, local_sgd or gossip"
        )
    if any(session.loop is not None for session in sessions_here()):
        barrier()


def broadcast_value(value: T, source: int, framework: str) -> T:
    """Return the value that rank `source` passes: text, numbers, None, lists and dicts. All ranks call this."""
    if not dist.is_initialized():
        return value
    meet(framework)
    try:
        encoded = msgspec.msgpack.encode(value)
    except (TypeError, NotImplementedError):
        encoded = b""
    if not encoded or msgspec.msgpack.decode(encoded) != value:
        raise ConfigurationError(
            f"{framework} can broadcast text, numbers, None, and lists and dicts of these between ranks, got "
            f"{type(value).__name__}; broadcast tensors with torch.distributed.broadcast"
        )
    data = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    size = torch.tensor([len(data)])
    dist.broadcast(size, source)
    if dist.get_rank() != source:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, source)
    decoded: T = msgspec.msgpack.decode(data.numpy().tobytes())
    return decoded
