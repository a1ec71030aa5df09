"""Elastic averaging whose elastic rate adapts to the convergence of the loss."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.errors import ConfigurationError, require
from flockstep.nodes import Worker
from flockstep.strategies.base import Traits
from flockstep.strategies.elastic_averaging import ElasticAveraging, largest_stable
from flockstep.strategies.resizing import Resizing


@dataclass
class DeepSparkState:
    """A worker's state: alpha, the sum and the number of losses since the last exchange, and the mean loss of the
    window before the last exchange.
    """

    alpha: float
    total: float = 0.0
    count: int = 0
    before: float | None = None


@dataclass(frozen=True)
class AdaptiveElasticAveraging(ElasticAveraging):
    """DeepSpark (Kim, Park, Jang & Yoon 2016): asynchronous elastic averaging that adapts alpha to convergence.

    The strategy is a reconstruction: the paper says that alpha adapts, but the paper's formula was not available. At
    each exchange a worker compares the mean loss of its steps since the last exchange with the mean loss of the
    previous window, r = (before - now) / before. If r > `improvement`, the worker converges, and explores more: alpha ←
    alpha / factor. Otherwise the worker moves closer to the other workers: alpha ← alpha · factor. alpha starts at
    `alpha` and stays in [smallest, largest] (by default `largest` is 1.8 / workers, at most 0.5 and at least `alpha`);
    with order `paper` alpha also stays stable for the learning rate. With factor = 1 the strategy equals easgd.
    """

    alpha: float = 0.1
    factor: float = 1.2
    improvement: float = 0.05
    smallest: float = 0.02
    largest: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            1 <= self.factor < float("inf"), "factor", ">= 1", self.factor, "1.2 is usual, and 1 keeps alpha constant"
        )
        require(0 <= self.improvement < 1, "improvement", "in [0, 1)", self.improvement, "use 0.05 for 5 %")
        if not 0 <= self.smallest <= self.alpha:
            raise ConfigurationError(
                f"smallest must be in [0, alpha] = [0, {self.alpha}], got {self.smallest}; lower smallest or raise "
                "alpha"
            )
        if self.beta is not None and self.beta > self.smallest:
            raise ConfigurationError(
                f"beta must be <= smallest = {self.smallest}, the lower limit of alpha, got {self.beta}; lower beta "
                "or raise smallest"
            )
        if self.largest is not None and not self.alpha <= self.largest <= 0.5:
            raise ConfigurationError(
                f"largest must be in [alpha, 0.5] = [{self.alpha}, 0.5], got {self.largest}; leave it out for "
                f"1.8 / workers"
            )

    # The traits of easgd; needs the loss of each step.
    traits = Traits("partial", survives=True, results=("server", "mean", "rank0", "best"), needs_job=True)

    def ceiling(self, workers: int, lr: float) -> float:
        """Return the upper bound on the elastic rate alpha.

        The bound is at least the initial alpha, except if the initial alpha is unstable for the learning rate.
        """
        largest = max(self.alpha, min(0.5, 1.8 / workers)) if self.largest is None else self.largest
        return min(largest, largest_stable(lr)) if self.order == "paper" else largest

    resizing = Resizing(replicas="own", own=("alpha",))

    def worker_state(self, me: Worker) -> DeepSparkState:
        return DeepSparkState(self.alpha)

    def elasticity(self, me: Worker) -> float:
        """Return the elastic rate alpha, adapted to the losses since the last exchange."""
        window: DeepSparkState = me.state
        if window.count:
            now = window.total / window.count
            if window.before:
                gain = (window.before - now) / window.before
                window.alpha = window.alpha / self.factor if gain > self.improvement else window.alpha * self.factor
            window.before, window.total, window.count = now, 0.0, 0
        ceiling = self.ceiling(me.workers, me.lr)
        window.alpha = min(max(window.alpha, self.smallest), ceiling)
        me.record_scalar("alpha", window.alpha)
        return window.alpha

    async def step(self, me: Worker) -> None:
        """Take one local step and record its loss."""
        window: DeepSparkState = me.state
        me.optimizer_step(await me.gradient())
        window.total += me.loss
        window.count += 1
