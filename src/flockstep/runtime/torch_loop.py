"""`flockstep.distribute` for PyTorch: the user's optimizer, whose `step` runs a strategy."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch

from flockstep.arrays.namespace import as_tensor, copied, to_device_of, to_host
from flockstep.arrays.schema import FlatArray
from flockstep.collectives.ring import Ring
from flockstep.errors import CompositionError, ConfigurationError
from flockstep.frameworks.torch_flat import FlatModule
from flockstep.frameworks.torch_optimizers import base_lr, for_servers, same_settings, settings_of
from flockstep.frameworks.torch_state import set_unrounded
from flockstep.nodes import BadGradients, BadGradientSettings, Worker
from flockstep.optimizers.base import Optimizer
from flockstep.optimizers.sgd import SGD
from flockstep.runtime.loop import Loop, OfFramework
from flockstep.runtime.torch_backward import BackwardHooks, GradientChangeDetector
from flockstep.runtime.torch_buffers import Buffers, Policy, all_packed, require_separate_statistics
from flockstep.runtime.torch_clipping import Clipping
from flockstep.runtime.torch_guard import Guard, require_same_parameters, require_unwrapped
from flockstep.runtime.torch_join import Consent, Remember
from flockstep.runtime.torch_keeper import TorchKeeper
from flockstep.runtime.torch_memory import WorkerMemory, memory_of
from flockstep.runtime.torch_shards import divided, fragments, largest
from flockstep.strategies.base import Strategy
from flockstep.strategies.encoding import codecs_of


class _UserOptimizer:
    """The user's optimizer as a worker's stepper; the flat arrays are the memory of its parameters and gradients."""

    def __init__(
        self, flat: FlatModule, optimizer: torch.optim.Optimizer, prepare: Callable[[], bool], holds: bool = False
    ):
        """`holds`: the optimizer steps elsewhere, and here it only receives the gradient."""
        self._holds = holds
        self._flat = flat
        self._optimizer = optimizer
        self._prepare = prepare

    @property
    def lr(self) -> float:
        """Current learning rate; the largest one if there are several groups."""
        return base_lr(self._optimizer)

    @property
    def settings(self) -> tuple[str, list[dict[str, Any]]]:
        """Name of the optimizer, and the settings of each of its groups."""
        return type(self._optimizer).__name__, settings_of(self._optimizer)

    def step(self, params: FlatArray, gradient: FlatArray, in_place: bool = False) -> None:
        """Step the user's optimizer with `gradient`, and leave each `.grad` with its part of `gradient`."""
        elsewhere = gradient is not self._flat.grads
        if elsewhere and not in_place:
            self._flat.grads[:] = gradient
        with self._flat.using(gradient) if elsewhere and in_place else nullcontext():
            if self._prepare() and not self._holds:
                with self._flat.stepping():
                    self._optimizer.step()

    def reset(self, params: FlatArray) -> None:
        """Clear the state of the user's optimizer; torch creates it again in the next step."""
        self._optimizer.state.clear()


class DistributedOptimizer(torch.optim.Optimizer):
    """The user's optimizer, whose `step` lets a strategy use the gradients; it has the original's attributes."""

    _step_supports_amp_scaling: ClassVar[bool] = True
    """`torch.amp.GradScaler` leaves it to `step` to unscale gradients and to skip steps with an overflow."""
    _shown = False
    """Whether the module holds the common model, inside of `consensus`."""

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        buffers: Policy = "mean",
        bad_gradients: BadGradientSettings = (None, None),
    ):
        # The base class is needed for isinstance checks (by schedulers); groups and state are the original's.
        _require_usable(module, optimizer)
        self.inner = optimizer
        without = [parameter for parameter in module.parameters() if parameter.grad is None]
        copies, parts = divided(module)
        self.flat = flat = FlatModule(module, copies=copies)
        self.buffers = Buffers(module, buffers)
        require_same_parameters(flat, optimizer)
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        self._searches = closure is not None and closure.default is inspect.Parameter.empty
        """Whether the optimizer cannot step without a closure, which it may evaluate several times, as L-BFGS."""
        if self._searches:
            _require_mean_gradient(optimizer, strategy, flat)
            _require_every_gradient(optimizer, BadGradients().replaced(*bad_gradients))
        server_side, self._sliced = strategy.traits.server_optimizer, strategy.traits.memory == "slices"
        self._spec: Optimizer = for_servers(optimizer, flat, as_torch=self._sliced) if server_side else SGD(lr=1.0)
        stepper = _UserOptimizer(flat, optimizer, self._prepare, holds=self._searches)
        keeper = TorchKeeper(
            flat,
            optimizer,
            self.buffers,
            server_side,
            self._why_not_stopped,
            lambda: self._spec,
            newest=None if parts is None else largest,
        )
        self.loop = Loop(
            flat.params,
            flat.grads,
            flat.schema,
            strategy,
            stepper,
            self._spec,
            OfFramework(
                self.buffers.packed,
                not flat.sharded,
                bad_gradients,
                parts=parts,
                fragments=None if parts is None else partial(fragments, flat),
                keeper=keeper,
            ),
        )
        if self._searches:
            _require_every_gradient(optimizer, self.loop.bad_gradients)  # those of the launch command, too
        alone = self.loop.alone
        self.clipping = Clipping(flat, strategy, alone)
        require_separate_statistics(module, self.loop.workers)
        require_unwrapped(module, self.loop.workers)
        if not self.loop.joined:
            self.loop.exchange("buffers", self.buffers.take_first)
        flat.move_gradients(self.loop.gradients)
        flat.gather_in_backward(leave=self.loop.only_steps)  # before other hooks, which look at gradients in places
        self._backward = BackwardHooks(flat, self.loop)
        combined = strategy.traits.clips != "own" and not alone
        self._watch = GradientChangeDetector(flat, strategy, combined)
        self._consent = Consent(flat, self.loop)
        self.loop.watch = self._guard = Guard(flat, optimizer, server_side)
        self.loop.compare_settings(loaded=bool(optimizer.state))  # before ranks take over a state of rank 0
        flat.signs = not alone and _averages_exactly(strategy)
        for parameter in without:  # a parameter that the first backward pass leaves out has none then
            parameter.grad = None
        self._memory = memory_of(flat, optimizer, self.loop, self._spec)
        self._memory.begin()
        self.loop.epoch = self._epoch
        optimizer.register_load_state_dict_post_hook(self._note_loaded)

    def __getattr__(self, name: str) -> Any:
        """Return the original optimizer's attribute, for example a hook or a method of its own.

        Changes of the parameters by such a method are accepted if servers do not undo them and no gradient of this rank
        is in them, as where a schedule-free optimizer puts in its average.
        """
        if name == "inner":
            raise AttributeError(name)
        method = getattr(self.inner, name)
        if name.startswith("_") or getattr(method, "__self__", None) is not self.inner:
            return method

        @functools.wraps(method)
        def call(*args: Any, **named: Any) -> Any:
            if self.loop.finished or self._shown or self._guard.changed() is not None:  # the next step tells
                return method(*args, **named)
            returned = method(*args, **named)
            if self._guard.changed() is not None:
                self._guard.require_no_own_step(f"{type(self.inner).__name__}.{name}()")
                self._note_moved()
            return returned

        return call

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ConfigurationError(
            "an optimizer of flockstep.distribute belongs to the run of this process and cannot be copied; copy "
            "optimizer.state_dict() instead"
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups of the original optimizer, which schedulers may change."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of the original optimizer."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Default settings of the original optimizer."""
        return self.inner.defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Pass the gradients of one mini-batch to the strategy; return when the next gradients can be computed.

        `closure` is called once to compute the gradients. An optimizer that cannot step without a closure (`LBFGS`)
        calls it several times, and uses the mean of all ranks' losses and gradients. Returns the loss, or None without
        a closure.

        Raises:
            ConfigurationError: called inside `no_sync`, or the gradients were changed after a part of them was sent.
            RunError: the run cannot continue.
        """
        if self._searches:
            return self._search(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._use_gradients()
        return loss

    def record_loss(self, loss: float | torch.Tensor) -> None:
        """Give the loss of the mini-batch of the next `step` to the record of the run, where trackers and reports find
        it.

        A tensor is copied from its device, which waits until the loss is computed. A loss that is not finite is treated
        as a gradient that is not finite.
        """
        self.loop.loss = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    def record_metric(
        self, name: str, value: float | torch.Tensor, *, higher_is_better: bool, count: float | None = None
    ) -> None:
        """Give a value of a metric of the script's own evaluation to the record of the run, by which reports and
        comparisons rank runs.

        Without `count`, the value of rank 0 stands for the run, and calls on other ranks do nothing. With `count`, the
        run's value at a step is the mean over the ranks that have recorded this metric at this step, weighted by their
        counts. The value belongs to the number of steps so far and to the time of the call; after `finish()` it
        describes the run's result. In a script that runs alone the call does nothing.

        Args:
            name: name of the metric, such as "accuracy"; a script may record any number of metrics.
            value: the value of this rank, a number or a tensor of one element.
            higher_is_better: whether a higher value is better; the same for all values of a name.
            count: weight of the value, >= 0, such as the number of samples that the rank has evaluated; None for the
                value of rank 0 alone.

        Raises:
            ConfigurationError: `name` is empty, `count` is negative, `higher_is_better` differs from an earlier value,
                or the run of a later call of `distribute` has been finished.
        """
        self.loop.record_metric(
            name, float(value.detach() if isinstance(value, torch.Tensor) else value), higher_is_better, count
        )

    def _search(self, closure: Callable[[], Any] | None) -> Any:
        """Let the original optimizer step by evaluating `closure` on all ranks, as often as it likes.

        Every evaluation is a step of the strategy, after which the gradients are the mean over all ranks. Because
        losses and gradients are equal on all ranks, the optimizer decides in the same way on every rank.
        """
        if closure is None:
            raise ConfigurationError(
                f"{type(self.inner).__name__} needs a closure that computes the loss and the gradients, got step() "
                "without one; pass it as step(closure)"
            )
        if self._consent.joining:
            raise CompositionError(
                f"{type(self.inner).__name__} evaluates its closure on all ranks together, even if a rank has no "
                f"more batches; give every rank the same number of batches (flockstep.shard does) without join() and "
                "private=True"
            )
        self._guard.check()

        def evaluated() -> Any:
            self._note_moved()
            with torch.enable_grad():
                loss = closure()
            try:
                own = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
            except (TypeError, ValueError, RuntimeError):
                raise ConfigurationError(
                    f"the closure must return the loss, one number, got {type(loss).__name__}; end it with return loss"
                ) from None
            self._use_gradients()
            if self.loop.workers == 1:
                return loss

            async def mean(me: Worker) -> float:
                total = np.array([own])
                await Ring().all_reduce(me, total)  # equal in every bit on all ranks
                return float(to_host(total)[0]) / me.workers

            return torch.as_tensor(self.loop.exchange("loss", mean), dtype=torch.float64)

        loss = self.inner.step(evaluated)
        self._note_moved()
        return loss

    def _note_moved(self) -> None:
        """Accept the parameters to which the optimizer itself has moved since the last evaluation of its closure."""
        self.flat.adopt()  # some optimizers assign to `.data`
        self._guard.note()

    def _use_gradients(self) -> None:
        """Pass the gradients of one mini-batch to the strategy."""
        if self._backward.paused:
            raise ConfigurationError(
                "step() inside no_sync() would use gradients that other workers have not received; leave the "
                "no_sync() block before the last backward() of a step"
            )
        overflow, scale = self._overflow(), self.__dict__.get("grad_scale")
        self._backward.check()
        if self._watch.check(allowed=int(overflow is not None)):
            self.loop.revise()
        # What is refused for its loss becomes zeros in the flat array.
        leave = not self._searches and scale is None and math.isfinite(self.loop.loss or 0.0)
        self.flat.gather_gradients(self._backward.handed_from, leave)
        if self.flat.copies is not None:
            self.loop.require(self.flat.copies.require_equal_gradients)
        self.clipping.begin()
        skips = self._consent.skips(overflow)
        if overflow is not None:
            _extend_scalers()
            (_overflowed.add if skips else _overflowed.discard)(self)
        if skips:
            self.loop.loss = None
            self._backward.skip()
            return
        if scale is not None:
            as_tensor(self.flat.grads).mul_(scale.double().reciprocal().to(torch.float32))
        self._advance()
        self.clipping.check()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which backward passes only accumulate gradients, as in DDP.

        The first backward pass after the context sends the accumulated gradients.
        """
        before, self._backward.paused = self._backward.paused, True
        try:
            yield
        finally:
            self._backward.paused = before

    def join(self, divide_by_initial_world_size: bool = True) -> AbstractContextManager[None]:
        """Context manager for ranks with different numbers of batches, as in DDP.

        A rank that reaches the end of the context adds zero gradients to the steps of the other ranks until all ranks
        have reached it. The sum is divided by the number of all ranks, or with `divide_by_initial_world_size=False` by
        the number of ranks that still have batches.
        """
        return self._consent.join(self._advance, self._remember, not divide_by_initial_world_size)

    @property
    def _remember(self) -> Remember | None:
        return self._memory.take_from if isinstance(self._memory, WorkerMemory) else None

    def _epoch(self) -> AbstractContextManager[None]:
        """Context manager of an epoch over private data: as `join`, unless that is open or the run has ended."""
        if self._consent.joining or self.loop.finished:
            return nullcontext()
        before = self.loop.steps
        return self._consent.join(self._advance, self._remember, False, lambda: self.loop.steps > before)

    def _why_not_stopped(self) -> str:
        """Reason why the script cannot be stopped between two steps; empty if it can be stopped."""
        if self._searches:
            return (
                f"flockstep.checkpoint does not work with {type(self.inner).__name__}, which may evaluate its closure "
                "several times in a step; save state_dict()s, as docs/how-to/loops.md shows"
            )
        if self._consent.joining:
            return (
                "flockstep.checkpoint does not work inside optimizer.join() or over private data, because ranks that "
                "have used all their batches do not call it; give every rank the same number of batches "
                "(flockstep.shard does)"
            )
        return ""

    def _advance(self) -> None:
        """Take one step of the strategy with the flat gradient."""
        if not self.loop.strategy.traits.server_optimizer:
            self.loop.step()
        else:  # the original never steps: its hooks are called here
            for before in self.inner._optimizer_step_pre_hooks.values():
                before(self.inner, (), {})
            spec = for_servers(self.inner, self.flat, self.clipping.max_norm, self._sliced)
            if not same_settings(spec, self._spec):  # of the groups and of clipping
                self._spec = spec
                self.loop.adopt(spec)
            self.loop.step()
            self.inner._opt_called = True  # type: ignore[attr-defined]  # schedulers check for a step
            for after in self.inner._optimizer_step_post_hooks.values():
                after(self.inner, (), {})
        self._backward.begin()

    def _prepare(self) -> bool:
        """Prepare the gradients that the original optimizer is about to use; return whether it may step."""
        traits = self.loop.strategy.traits
        own = traits.clips == "own"
        if own and self._consent.shadowing:
            return False
        if not own and self._consent.share != 1.0:
            self.flat.grads *= self._consent.share
        self.flat.write_gradients()
        if not self.clipping.apply():
            return False
        if self.flat.signs:
            self.flat.drop_absent_everywhere()
            return True
        cell = self.loop.strategy.taxonomy_entry
        together = traits.alike and (cell is None or cell.optimization == "central")
        if self.loop.workers == 1 or (own and not together):
            self.flat.drop_absent()  # no other worker had a gradient for them: the original skips them, as usual
        return True

    def _overflow(self) -> bool | None:
        """Whether a `GradScaler` found an infinite gradient on this rank; None without a scaler."""
        found = self.__dict__.get("found_inf")
        if found is not None:
            self._backward.revise(
                f"{self.loop.strategy} had sent part of the gradients before GradScaler could unscale them; use the "
                "strategy all_reduce, which reads the gradients in step()"
            )
        own = not self.loop.strategy.traits.server_optimizer or self.flat.schema.dtype == "float16"
        if own and self.__dict__.get("grad_scale") is not None:
            for entry, parameter in zip(self.flat.schema.entries, self.flat.parameters, strict=True):
                if parameter.dtype is torch.float16:  # as torch refuses it: the unscaled gradient would become zero
                    raise ConfigurationError(
                        "GradScaler needs parameters of float32, because float16 would round the unscaled gradients, "
                        f"got {entry.name} in float16; keep parameters in float32 under autocast"
                    )
        return None if found is None else bool(found)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients of all parameters to None, as torch does, or to zeros if `set_to_none` is False.

        A parameter that the next backward pass gives no gradient is skipped by the optimizer of a single worker, and by
        strategies whose workers step with their own gradients. Under strategies that average gradients without a codec
        (`all_reduce`, `bucketed`, `fused`), a parameter is skipped if no rank has a gradient of it, as under DDP.
        Otherwise its gradient counts as zero.
        """
        self.clipping.skip()
        if set_to_none:
            self.flat.drop_gradients()
        else:
            self.flat.zero_grad()

    def finish(self) -> None:
        """End the run; afterwards the model holds the result, equal on every worker.

        Raises:
            ConfigurationError: the script has changed or loaded parameters since the last step without `sync()`, or
                has taken its steps with another optimizer than this one.
            RunError: the run cannot continue.
        """
        running = not self.loop.finished
        if running:
            self._guard.check_structure()
            if not self._guard.unsent:
                self.loop.require_used()
            self._guard.check()
        self._backward.end()
        self._guard.end()
        Clipping.live.discard(self.clipping)
        if running:  # the memory of the strategy ends with the run
            self.flat.return_gradients()
        self._memory.finish()
        if running:  # afterwards they are the script's own
            self.flat.keep_gradients(self.loop.gradients)
            self.flat.write_parameters()
        self._take_buffers(self.loop.handed)
        self.loop.handed.clear()

    def sync(self) -> None:
        """Continue from a model that the script has changed or loaded; call this on every rank, between two steps.

        All ranks and servers take rank 0's parameters and buffers, and the strategy restarts. Optimizers keep their
        state. If rank 0 has loaded an optimizer state, the servers and the ranks that have loaded no state receive that
        state; all ranks receive it if they step with a common gradient.

        Raises:
            ConfigurationError: parameters were replaced, unfrozen or converted, or the run has been finished.
        """
        self._guard.check_structure()
        if self._backward.handed:
            raise ConfigurationError(
                "sync() was called between backward() and step(), after part of the gradients had been sent; call it "
                "after step()"
            )
        self.flat.adopt()
        self._memory.restart()
        self._guard.unsent = False
        self._backward.begin()
        self.loop.exchange("buffers", self.buffers.take_first)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Context manager in which the module holds the common model, equal on every rank, as `finish()` would return
        it.

        Every rank must enter it at the same point, between two steps, to evaluate or save the model. Afterwards the
        module holds the rank's own replica and buffers again. Inside the context, entering it again does nothing.

        Raises:
            CompositionError: the strategy has no common model.
            ConfigurationError: the run has been finished, or the script has changed parameters since the last step.
        """
        if self._shown:
            yield
            return
        if not self.loop.finished:
            self._guard.check()
        kept, model = self.buffers.packed(), copied(to_device_of(self.loop.common(), self.flat.params))
        self.sync_buffers()
        own = copied(self.flat.params)  # last: background tasks write to the replica during both exchanges
        self._show(model)
        self._shown = True
        try:
            yield
        finally:
            self._shown = False
            self._show(own)
            self.buffers.restore(kept)

    def _show(self, params: FlatArray) -> None:
        """Let the module hold that model."""
        self.flat.params[:] = params
        self.flat.write_parameters()

    def _take_buffers(self, packed: Mapping[int, FlatArray]) -> None:
        left = self.buffers.take(packed)
        if left and self.loop.rank == 0:
            warnings.warn(
                f"buffer {left[0]} has changed its shape since flockstep.distribute, so that each rank keeps its own "
                "values of it; keep one shape during training if all ranks need the same values",
                UserWarning,
                stacklevel=3,
            )

    def sync_buffers(self) -> None:
        """Make the module's buffers equal on all ranks by the policy given to `distribute`; call this on every rank.

        Raises:
            ConfigurationError: the ranks' buffers differ in size, or the run has been finished.
        """
        if self.buffers:
            self._take_buffers(self.loop.exchange("buffers", lambda me: all_packed(me, self.buffers.packed())))

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the slices of the optimizer's state on rank `to`, which may then call `state_dict` until its next
        step.

        Every rank must call this between two steps, as with `torch.distributed.optim.ZeroRedundancyOptimizer`. Under
        strategies whose workers hold no slices, this method does nothing.

        Raises:
            ConfigurationError: there is no such rank, or the run has been finished.
        """
        if not 0 <= to < self.loop.workers:
            raise ConfigurationError(f"to must be a rank from 0 to {self.loop.workers - 1}, got {to}; use 0")
        self._memory.consolidate(to)

    def state_dict(self) -> dict[str, Any]:
        """State of the original optimizer; if servers step, with the state of the servers' optimizers.

        A single rank may call this. If each worker holds a slice of the state, every rank must call
        `consolidate_state_dict` first. If parameters are narrower than the flat array, `master` holds this rank's
        unrounded values of them, by name.

        Raises:
            ConfigurationError: other ranks hold parts of the state that have not been collected.
        """
        self._memory.fetch()
        state, master = self.inner.state_dict(), self.flat.master()
        self._memory.release()
        return {**state, "master": master} if master else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the original optimizer.

        Before a state that holds a `master` is loaded, the module must have been loaded from the same checkpoint.
        Afterwards, call `sync()` on every rank if servers step, if ranks share a gradient, or if the state holds a
        `master`.

        Raises:
            ConfigurationError: `master` is not the master copy of the module's parameters, or workers would round
                values that servers stored without rounding.
        """
        if "master" in state_dict:
            self.flat.load_master(state_dict["master"])
        self.inner.load_state_dict(state_dict)
        if self.flat.rounds:
            set_unrounded(self.inner, state_dict, keep=self.loop.strategy.traits.server_optimizer)
        self._guard.unsent |= "master" in state_dict

    def _note_loaded(self, _: torch.optim.Optimizer) -> None:
        self._guard.unsent = self._memory.loaded()

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.inner!r}, strategy={str(self.loop.strategy)!r})"


def _averages_exactly(strategy: Strategy) -> bool:
    """Whether every worker steps along the plain mean of the gradients, in which no part has been encoded."""
    traits, coding = strategy.traits, strategy.coding
    plain = traits.approximation == "none" and (coding is None or coding.lossless)
    return traits.clips == "combined" and traits.alike and plain


def _require_mean_gradient(optimizer: torch.optim.Optimizer, strategy: Strategy, flat: FlatModule) -> None:
    """Raise an error unless every evaluation of a closure can give all ranks the mean of their losses and gradients."""
    name, traits = type(optimizer).__name__, strategy.traits
    exact = traits.approximation == "none" and all(codec.lossless for codec in codecs_of(strategy))
    if not (traits.alike and traits.clips == "combined" and exact):
        raise CompositionError(
            f"{name} evaluates its closure several times per step and compares the losses and gradients, which must be "
            f"the mean over all ranks each time, got {strategy}; use all_reduce without a codec, or an optimizer whose "
            "step() needs no closure, such as torch.optim.SGD"
        )
    if flat.sharded:
        raise ConfigurationError(
            f"{name} compares gradients over the whole model, but a process holds only the shards of its DTensors; use "
            "an optimizer whose step() needs no closure, such as torch.optim.AdamW"
        )
    if flat.rounds:
        raise ConfigurationError(
            f"{name} compares losses at several points, and rounding parameters to a narrower dtype than the gradients "
            "would move these points; keep all parameters in one dtype, float32 or wider"
        )


def _require_every_gradient(optimizer: torch.optim.Optimizer, bad_gradients: BadGradients) -> None:
    """Raise `CompositionError` if bad gradients become zeros, which would contradict the closure's loss."""
    if bad_gradients.action != "stop":
        raise CompositionError(
            f"{type(optimizer).__name__} compares losses and gradients, of which none may be left out, got "
            f"on_bad_gradient={bad_gradients.action}; use on_bad_gradient=stop, or an optimizer whose step() needs no "
            "closure, such as torch.optim.SGD"
        )


_overflowed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers whose last step all ranks have skipped, because a gradient overflowed on one rank."""


@functools.cache
def _extend_scalers() -> None:
    """Let the gradient scaler of every rank back off after a step that all ranks have skipped, so that scales stay
    equal: a scaler itself looks only at the gradient of its own rank, under DDP at the mean.
    """
    update = torch.amp.GradScaler.update

    @functools.wraps(update)
    def update_together(scaler: Any, *arguments: Any, **options: Any) -> None:
        states = scaler._per_optimizer_states if scaler.is_enabled() else {}
        for optimizer in [each for each in _overflowed if id(each) in states]:
            for found in states[id(optimizer)]["found_inf_per_device"].values():
                found.fill_(1.0)
            _overflowed.discard(optimizer)
        update(scaler, *arguments, **options)

    torch.amp.GradScaler.update = update_together  # type: ignore[assignment, method-assign]


def _require_usable(module: object, optimizer: object) -> None:
    """Raise `ConfigurationError` unless these are a module, and an optimizer that steps along a dense gradient."""
    for name, value, kind, wanted in (
        ("model", module, torch.nn.Module, "torch.nn.Module"),
        ("optimizer", optimizer, torch.optim.Optimizer, "torch.optim.Optimizer"),
    ):
        if not isinstance(value, kind):
            raise ConfigurationError(
                f"the {name} of flockstep.distribute must be a {wanted}, got {type(value).__name__}; write "
                'flockstep.distribute(model, optimizer, "all_reduce"), in this order'
            )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigurationError(
            "SparseAdam needs sparse gradients, but strategies combine dense gradients; use Adam, or "
            "torch.optim.Adagrad, which does not change rows without a gradient; sparse=True may stay"
        )
