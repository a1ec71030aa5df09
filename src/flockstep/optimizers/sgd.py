"""Stochastic gradient descent, with momentum."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flockstep.arrays.namespace import namespace
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, require
from flockstep.optimizers.base import BLOCK, Optimizer, OptimizerState, blocks


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent (Robbins & Monro 1951), also with heavy-ball (Polyak 1964) or Nesterov momentum
    (Nesterov 1983).

    With g' = g + weight_decay w: v ← momentum v + (1 - dampening) g' (v ← g' at the first step), and w ← w - lr v;
    Nesterov momentum uses g' + momentum v in place of v. Without momentum, w ← w - lr g', with every product and every
    difference rounded to the parameters' dtype. For a share of a full step g' = share (g + weight_decay w), so that
    over all later steps g moves w by share lr g / (1 - momentum). Slots: `momentum` (v), only if momentum is not 0.
    """

    lr: float = 0.01
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        require(0 <= self.lr < math.inf, "lr of sgd", ">= 0 and finite", self.lr, "use for example 0.1")
        require(0 <= self.momentum < math.inf, "momentum of sgd", ">= 0 and finite", self.momentum, "use 0 for none")
        require(math.isfinite(self.dampening), "dampening of sgd", "finite", self.dampening, "use 0 for none")
        decays = 0 <= self.weight_decay < math.inf
        require(decays, "weight_decay of sgd", ">= 0 and finite", self.weight_decay, "use 0 for none")
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ConfigurationError(
                f"nesterov of sgd needs momentum > 0 and dampening 0, got momentum={self.momentum} and "
                f"dampening={self.dampening}; use for example momentum=0.9"
            )

    def init(self, params: FlatArray) -> OptimizerState:
        return OptimizerState(slots={"momentum": namespace(params).zeros_like(params)} if self.momentum else {})

    def step(
        self, params: FlatArray, gradient: FlatArray, state: OptimizerState, lr: float, share: float = 1.0
    ) -> None:
        if self.momentum or self.weight_decay or len(params) > BLOCK:
            self.step_with(self.momentum or None, params, gradient, state, lr, share)
            return
        params -= float(lr * share) * gradient
        state.steps += float(share)

    def step_with(
        self,
        momentum: float | None,
        params: FlatArray,
        gradient: FlatArray,
        state: OptimizerState,
        lr: float,
        share: float = 1.0,
    ) -> None:
        """Take a step with the given momentum, which may be negative, in place of the optimizer's own.

        With a momentum of 0 the velocity is updated but not used; with None there is no velocity.
        """
        rate, share = float(lr * share if momentum is None else lr), float(share)
        first_step, state.steps = state.steps == 0, state.steps + share
        xp = namespace(params)
        first, second = xp.empty_like(params[:BLOCK]), xp.empty_like(params[:BLOCK])
        for part in blocks(len(params)):
            w, g = params[part], gradient[part]
            change = first[: len(w)]
            if self.weight_decay:
                xp.multiply(w, self.weight_decay, out=change)
                g = xp.add(change, g, out=change)
            if momentum is not None:
                if share != 1:
                    g = xp.multiply(g, share, out=change)
                v = state.slots["momentum"][part]
                g = self._move(v, g, momentum, second[: len(w)], first_step)
            xp.multiply(g, rate, out=change)
            xp.subtract(w, change, out=w)

    def _move(self, v: FlatArray, g: FlatArray, momentum: float, scratch: FlatArray, first_step: bool) -> FlatArray:
        """Update the velocity `v` by `g`, and return the direction of the step, which may be `scratch`."""
        xp = namespace(v)
        if first_step:
            v[:] = g
        else:
            xp.multiply(v, momentum, out=v)
            if self.dampening:
                xp.multiply(g, 1 - self.dampening, out=scratch)
                xp.add(v, scratch, out=v)
            else:
                xp.add(v, g, out=v)
        if not self.nesterov:
            return v
        xp.multiply(v, momentum, out=scratch)
        xp.add(scratch, g, out=scratch)
        return scratch
