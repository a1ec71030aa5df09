"""`flockstep.distribute` for PyTorch: the user's optimiser, with a strategy in its `step`."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from flockstep.arrays.schema import FlatArray
from flockstep.drivers.loop import Loop, ticket_from_environment
from flockstep.drivers.torch_backward import Backward
from flockstep.errors import ConfigurationError
from flockstep.frameworks.torch_flat import FlatModule
from flockstep.frameworks.torch_optimizers import from_torch
from flockstep.optimizers.base import Optimizer
from flockstep.optimizers.sgd import SGD
from flockstep.strategies.base import Strategy

B = TypeVar("B")


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


class DistributedOptimizer(torch.optim.Optimizer):
    """The user's optimiser, whose `step` lets a strategy use the gradients; everything else is the original's."""

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy):
        # The base class is for isinstance alone (schedulers ask); groups and state are the original's.
        self.inner = optimizer
        self.flat = FlatModule(module)
        _require_same_parameters(module, optimizer)
        server_side = strategy.traits.server_optimizer
        spec: Optimizer = from_torch(optimizer) if server_side else SGD(lr=1.0)
        stepper = _UserOptimizer(self.flat, optimizer)
        self.loop = Loop(self.flat.params, self.flat.grads, self.flat.schema, strategy, stepper, spec)
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


class Shard(Generic[B]):
    """This worker's part of a loader's batches; as many on every worker."""

    def __init__(self, loader: Iterable[B], rank: int, workers: int):
        self._loader = loader
        self._rank = rank
        self._workers = workers

    def __iter__(self) -> Iterator[B]:
        batches = iter(self._loader)
        while len(turn := list(itertools.islice(batches, self._workers))) == self._workers:
            yield turn[self._rank]

    def __len__(self) -> int:
        return len(self._loader) // self._workers  # type: ignore[arg-type]


_epochs: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class ShardedLoader(Generic[B]):
    """A data loader over this worker's part of the data set, drawn anew each time it is iterated."""

    def __init__(self, loader: DataLoader[B], rank: int, workers: int):
        self._original = loader
        shuffled = isinstance(loader.sampler, RandomSampler)
        self._sampler: DistributedSampler[Any] = DistributedSampler(
            loader.dataset, workers, rank, shuffle=shuffled, drop_last=loader.drop_last
        )
        self._loader: DataLoader[B] = DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            sampler=self._sampler,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            drop_last=loader.drop_last,
        )

    def __iter__(self) -> Iterator[B]:
        epoch = _epochs.get(self._original, 0)
        _epochs[self._original] = epoch + 1
        self._sampler.set_epoch(epoch)
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)


def shard(loader: Iterable[B]) -> Iterable[B]:
    """This worker's part of what `loader` yields; all of it where nobody launched several workers.

    A `DataLoader` over a data set that can be indexed is split by samples, reshuffled each epoch if it shuffles. From
    anything else worker i of n takes every n-th batch; what is left over at the end is dropped, so that every worker
    takes as many steps.

    Raises:
        ConfigurationError: the loader has a sampler of its own, which says already who gets what.
    """
    ticket = ticket_from_environment()
    if ticket is None or ticket.workers == 1:
        return loader
    if isinstance(loader, DataLoader) and loader.batch_size is not None and hasattr(loader.dataset, "__getitem__"):
        if not isinstance(loader.sampler, (RandomSampler, SequentialSampler)):
            raise ConfigurationError(
                f"the loader has a {type(loader.sampler).__name__} of its own; leave the sampler out and let "
                "flockstep.shard split the data, or split it yourself and do not call flockstep.shard"
            )
        return ShardedLoader(loader, ticket.address, ticket.workers)
    return Shard(loader, ticket.address, ticket.workers)
