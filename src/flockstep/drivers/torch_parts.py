"""Distributes each of several optimizers with the part of a module that it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import nn

from flockstep.drivers.node_spec import joining_run, strategy_of_run
from flockstep.drivers.torch_buffers import Policy
from flockstep.drivers.torch_group import meet
from flockstep.drivers.torch_loop import DistributedOptimizer
from flockstep.errors import ConfigurationError
from flockstep.strategies.base import Strategy


class Coordinated:
    """What the classes for Lightning and Accelerate share: the optimizers that one strategy coordinates."""

    framework: str

    def coordinate(self, strategy: str | Strategy, buffers: Policy, timeout: float) -> None:
        """Set the strategy of the optimizers that are prepared from now on. The arguments are those of
        `flockstep.distribute`.
        """
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
        """Copy rank 0's models and optimizers, which the script has loaded, to all ranks; every rank must call this
        method.
        """
        for each in self._live():
            each.sync()


def distribute_part(
    modules: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    buffers: Policy = "mean",
    timeout: float = 600.0,
) -> DistributedOptimizer:
    """Call `flockstep.distribute` for the part of `modules` that `optimizer` trains.

    Raises:
        ConfigurationError: the optimizer holds no parameters of the modules, or only some parameters of a layer, or
            `distribute` refuses the call.
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
    """Return the part of `module` whose trainable parameters are the parameters of `optimizer`.

    It is the module itself, one of its submodules, or a `ModuleList` of several submodules.

    Raises:
        ConfigurationError: the optimizer holds some, but not all, parameters of a module without submodules.
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
