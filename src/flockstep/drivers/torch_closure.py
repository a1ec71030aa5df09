"""Optimizers that evaluate their closure several times per step, such as L-BFGS, under a strategy."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from flockstep.arrays.namespace import to_host
from flockstep.collectives.ring import Ring
from flockstep.drivers.loop import Loop
from flockstep.errors import CompositionError, ConfigurationError
from flockstep.nodes import BadGradients, Worker
from flockstep.strategies.base import Strategy
from flockstep.strategies.encoding import codecs_of


def evaluates_closures(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer.step(closure)` may evaluate the closure several times; such an optimizer cannot step without a
    closure.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def require_mean_gradient(optimizer: torch.optim.Optimizer, strategy: Strategy, narrow: bool) -> None:
    """Raise an error unless every evaluation of a closure can give all ranks the mean of their losses and gradients.

    `narrow` says whether some parameters are narrower than the flat array.

    Raises:
        CompositionError: under the strategy, ranks do not step along the mean of all gradients, or do not receive the
            whole mean.
        ConfigurationError: the parameters have several dtypes.
    """
    name, traits = type(optimizer).__name__, strategy.traits
    exact = traits.approximation == "none" and all(codec.lossless for codec in codecs_of(strategy))
    if not (traits.alike and traits.clips == "combined" and exact):
        raise CompositionError(
            f"{name} evaluates its closure several times per step and compares the losses and gradients, which must be "
            f"the mean over all ranks each time, got {strategy}; use all_reduce without a codec, or an optimizer whose "
            "step() needs no closure, such as torch.optim.SGD"
        )
    if narrow:
        raise ConfigurationError(
            f"{name} compares losses at several points, and rounding parameters to a narrower dtype than the gradients "
            "would move these points; keep all parameters in one dtype, float32 or wider"
        )


def require_every_gradient(optimizer: torch.optim.Optimizer, bad_gradients: BadGradients) -> None:
    """Raise `CompositionError` if bad gradients are replaced with zeros, which an optimizer that compares losses cannot
    use.

    The zeros would contradict the loss that the closure returns.
    """
    if bad_gradients.action != "stop":
        raise CompositionError(
            f"{type(optimizer).__name__} compares losses and gradients, of which none may be left out, got "
            f"on_bad_gradient={bad_gradients.action}; use on_bad_gradient=stop, or an optimizer whose step() needs no "
            "closure, such as torch.optim.SGD"
        )


class ClosureSteps:
    """Steps of an optimizer that evaluates its closure several times.

    Every evaluation is a step of the strategy, after which the gradients are the mean over all ranks. Because losses
    and gradients are equal on all ranks, the optimizer decides in the same way on every rank.
    """

    def __init__(self, loop: Loop, exchange: Callable[[], None]):
        """`exchange` passes this rank's gradients to the strategy, which replaces them with the mean of all ranks."""
        self._loop = loop
        self._exchange = exchange

    def mean(self, closure: Callable[[], Any]) -> Any:
        """Evaluate `closure`; return the mean of all ranks' losses, and leave the mean of all ranks' gradients in the
        parameters.

        Raises:
            ConfigurationError: the closure does not return a loss.
        """
        with torch.enable_grad():
            loss = closure()
        try:
            own = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        except (TypeError, ValueError, RuntimeError):
            raise ConfigurationError(
                f"the closure must return the loss, one number, got {type(loss).__name__}; end it with return loss"
            ) from None
        self._exchange()
        if self._loop.workers == 1:
            return loss
        return torch.as_tensor(self._loop.exchange("loss", lambda me: _mean(me, own)), dtype=torch.float64)


async def _mean(me: Worker, own: float) -> float:
    """Mean over all ranks, equal in every bit."""
    total = np.array([own])
    await Ring().all_reduce(me, total)
    return float(to_host(total)[0]) / me.workers
