"""Searches the hyper-parameters of the most promising strategies for the shortest time to target, within a budget."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flockstep.errors import ConfigurationError, RunError
from flockstep.planning.plan import Outlook, combines
from flockstep.planning.search_space import Knob, changed, knobs, learning_rate
from flockstep.planning.step_prediction import StepPrediction
from flockstep.planning.trial_store import TrialStore
from flockstep.planning.trials import Trial, TrialContext, trial
from flockstep.strategies.base import Strategy
from flockstep.workloads.base import require_module

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.study import Study

TRIALS = 8
"""Default number of trials of each strategy."""
TOP = 5
"""Default number of strategies that a search tries, in addition to one worker."""
SLACK = 2.0
"""Limit on the virtual time of a trial, as a multiple of the shortest time to target found so far."""
RANDOM = 3
"""Number of a strategy's first trials that use no earlier results: the strategy as written, then the learning rate that
Table 2 of Langer et al. suggests, then random draws.
"""
TRIES = 4
"""Largest number of draws of hyper-parameters for one trial; several are needed because some combinations are not
allowed.
"""
FAR = 1e9
"""Value added to the objective of a trial that missed the target, so that such trials rank last."""


@dataclass(frozen=True)
class Found:
    """The trials that a search has run for one strategy of the plan."""

    strategy: str
    """Name of the strategy in the plan."""
    trials: tuple[Trial, ...]
    """Trials in order; the first trial runs the strategy as written, with the job's learning rate."""
    refused: str | None = None
    """Reason why there are no trials, or no further trials, of the strategy."""

    @property
    def best(self) -> Trial | None:
        """The trial that reached the target first; if no trial reached the target, the trial that came closest."""
        return min(self.trials, key=_cost, default=None)

    @property
    def seconds(self) -> float | None:
        """Virtual seconds to target with the best hyper-parameters found; None if every trial missed the target."""
        return None if self.best is None else self.best.seconds_to_target

    def document(self) -> dict[str, Any]:
        """Return the trials as plain data, for JSON."""
        best = self.best
        return {
            "strategy": self.strategy,
            "seconds_to_target": self.seconds,
            "best": None if best is None else best.document(),
            "trials": [one.document() for one in self.trials],
            "refused": self.refused,
        }


@dataclass(frozen=True)
class SearchProgress:
    """Progress of a search, reported during and after trial `number` of a strategy."""

    strategy: str
    number: int
    trials: int
    """Number of trials of each strategy."""
    done: int
    all_trials: int
    steps: float
    """Mean number of steps of a worker in the running trial."""
    seconds: float
    """Virtual seconds since the beginning of the running trial."""
    trial: Trial | None
    """Result of the trial; None while the trial runs."""
    again: bool
    """Whether the result of the trial was stored by an earlier search."""
    best: tuple[str, Trial] | None
    """The strategy with the shortest time to target so far, and the trial that took this time."""


def most_promising(outlook: Outlook, top: int = TOP, leave: Iterable[str] = ()) -> tuple[StepPrediction, ...]:
    """Return one worker, and the `top` strategies with the highest predicted speed-up in the plan, except the
    strategies in `leave`.

    Raises:
        ConfigurationError: `top` is below 1.
    """
    if top < 1:
        raise ConfigurationError(f"top must be >= 1 strategy, got {top}; 5 is usual")
    out = set(leave)
    fit = [one for one in outlook.predictions if one.strategy is not None and combines(one) and one.name not in out]
    ranked = sorted(fit, key=lambda one: -outlook.effective_rate(one))
    return (outlook.alone, *ranked[:top])


@dataclass
class Search:
    """Trials of several strategies in turn. Results are available at any time, even after an interruption."""

    outlook: Outlook
    candidates: Sequence[StepPrediction]
    kept: TrialStore
    trials: int = TRIALS
    budget: float | None = None
    """Real seconds after which no further trial begins, except one trial of one worker. Trials that are read from the
    store take none of the budget.
    """
    target: float | None = None
    seed: int = 0
    split: str = "iid"
    context: TrialContext | None = None
    """The data and the engines that the trials share."""
    out_of_budget: bool = False
    _studies: list[_Candidate] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.trials < 1 or (self.budget is not None and not self.budget > 0):
            raise ConfigurationError(
                f"trials must be >= 1 and a budget > 0 s, got {self.trials} and {self.budget}; 8 trials are usual"
            )
        require_module("optuna", "search", "a search for hyper-parameters")
        self._context = self.context or TrialContext(self.outlook.site)
        lr = self._context.engine(self._context.job(self.seed), self.seed).optimizer.lr
        if math.isnan(lr):
            raise ConfigurationError(
                "a search changes the learning rate, but only optax knows the learning rate of this job's optimizer; "
                "use for example "
                "optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), or plan without trials"
            )
        self._studies = [
            _Candidate(one, lr, self.outlook.workers, self.seed, _guess(self.outlook, one)) for one in self.candidates
        ]

    def found(self) -> tuple[Found, ...]:
        """The trials of every strategy that was tried."""
        known = [Found(one.predicted.name, tuple(one.done), one.refused) for one in self._studies]
        return tuple(one for one in known if one.trials or one.refused)

    @property
    def done(self) -> int:
        """Number of finished trials, including trials that are read from the store."""
        return sum(len(one.done) for one in self._studies)

    @property
    def best(self) -> tuple[str, Trial] | None:
        """The strategy of the plan with the shortest time to target so far, and the trial that took this time."""
        reached = [(one.strategy, one.best) for one in self.found() if one.best is not None and one.seconds is not None]
        return min(reached, key=lambda pair: _cost(pair[1]), default=None)

    def run(self, say: Callable[[SearchProgress], None] = lambda step: None) -> tuple[Found, ...]:
        """Run trials of the strategies in turn until all trials are done or the budget is spent. `say` is called at
        every gradient and after every trial.

        Raises:
            ConfigurationError: there is no data to train with.
        """
        began = time.monotonic()
        try:
            for number in range(1, self.trials + 1):
                for one in self._studies:
                    if one.refused is None:
                        self._turn(one, number, began, say)
        except _OutOfBudget:
            self.out_of_budget = True
        return self.found()

    def _turn(self, one: _Candidate, number: int, began: float, say: Callable[[SearchProgress], None]) -> None:
        def heed(steps: float, seconds: float, done: Trial | None = None, again: bool = False) -> None:
            at = self.done
            whole = self.trials * len(self._studies)
            say(
                SearchProgress(
                    one.predicted.name, number, self.trials, at, whole, steps, seconds, done, again, self.best
                )
            )
            if self.budget is not None and at and time.monotonic() - began > self.budget:
                raise _OutOfBudget

        try:
            choice = one.next()
            if choice is None:
                return
            strategy, lr = choice
            name = one.predicted.name if strategy is None else str(strategy)
            within = self._within(one)
            known = self.kept.find(name, lr, within)
            result = known or self._run(strategy, lr, within, heed)
        except (ConfigurationError, RunError) as error:
            one.refused = str(error)
            if one.predicted.strategy is None:
                raise
            return
        if known is None:
            self.kept.add(result, lr, within)
        one.tell(result)
        heed(result.steps, result.seconds, result, known is not None)

    def _run(
        self, strategy: Strategy | None, lr: float, within: float | None, heed: Callable[[float, float], None]
    ) -> Trial:
        return trial(
            self.outlook.site,
            strategy,
            self.outlook.workers,
            target=self.target,
            lr=lr,
            seed=self.seed,
            within=within,
            split=self.split,
            context=self._context,
            heed=heed,
        )

    def _within(self, one: _Candidate) -> float | None:
        """Virtual seconds after which a trial cannot yield a better result; None without a limit."""
        limits = [result.seconds_to_target for result in one.done if result.seconds_to_target is not None]
        if self.best is not None:
            limits.append(SLACK * _cost(self.best[1]))
        elif one.predicted.strategy is not None:  # one worker did not get there either
            limits += [SLACK * result.seconds for result in self._studies[0].done if self._studies[0] is not one]
        return min(limits, default=None)


class _OutOfBudget(Exception):
    """Raised when the real time of a search is used up."""


class _Candidate:
    """One strategy: its finished trials, and its next trial."""

    def __init__(self, predicted: StepPrediction, lr: float, workers: int, seed: int, guess: float):
        """`guess`: factor on the job's learning rate that is tried first; 1 for none."""
        self.predicted = predicted
        self.done: list[Trial] = []
        self.refused: str | None = None
        self._workers = workers
        strategy = predicted.strategy
        own = () if strategy is None else tuple(knobs(strategy, workers))
        self._knobs = {knob.name: knob for knob in (learning_rate(lr), *own)}
        self._seed = zlib.crc32(f"{seed} {predicted.name}".encode())
        self._study: Study | None = None
        self._asked: Any = None
        self._guess = guess

    def next(self) -> tuple[Strategy | None, float] | None:
        """The strategy and the learning rate to try; None if no allowed combination was drawn."""
        if not self.done:
            return self.predicted.strategy, self._knobs["lr"].value
        from optuna.trial import TrialState

        study = self._begun()
        for _ in range(TRIES):
            self._asked = study.ask(self._space())
            try:
                return self._built(self._asked.params)
            except ConfigurationError:
                study.tell(self._asked, state=TrialState.FAIL)
        return None

    def tell(self, result: Trial) -> None:
        """Add a finished trial to the results from which the next trials are chosen."""
        self.done.append(result)
        if self._asked is not None:
            self._begun().tell(self._asked, _cost(result))
            self._asked = None

    def _built(self, params: dict[str, Any]) -> tuple[Strategy | None, float]:
        strategy = self.predicted.strategy
        for name, knob in self._knobs.items():
            if name != "lr" and strategy is not None:
                strategy = changed(strategy, knob.path, params[name] if knob.whole else _short(params[name]))
        if strategy is not None:
            strategy.check(self._workers)
        return strategy, _short(params["lr"])

    def _begun(self) -> Study:
        """The Optuna study, with the first trial added."""
        if self._study is None:
            import optuna

            optuna.logging.set_verbosity(optuna.logging.ERROR)
            sampler = optuna.samplers.TPESampler(seed=self._seed, n_startup_trials=RANDOM, multivariate=True)
            self._study = optuna.create_study(sampler=sampler)
            first = {name: knob.value for name, knob in self._knobs.items()}
            self._study.add_trial(
                optuna.trial.create_trial(params=first, distributions=self._space(), value=_cost(self.done[0]))
            )
            rate = self._knobs["lr"]
            guess = max(rate.low, min(rate.value * self._guess, rate.high))
            if guess != rate.value:
                self._study.enqueue_trial({**first, "lr": guess})
        return self._study

    def _space(self) -> dict[str, BaseDistribution]:
        return {name: _distribution(knob) for name, knob in self._knobs.items()}


def _guess(outlook: Outlook, found: StepPrediction) -> float:
    """Likely factor on the best learning rate, by Table 2: the square root of the workers, or its inverse, or 1."""
    if found.strategy is None:
        return 1.0
    root = math.sqrt(found.workers)
    return {"higher": root, "lower": 1 / root, "likely": 1.0}[outlook.criteria(found).learning_rate]


def _distribution(knob: Knob) -> BaseDistribution:
    from optuna.distributions import FloatDistribution, IntDistribution

    if knob.whole:
        return IntDistribution(int(knob.low), int(knob.high), log=knob.log)
    return FloatDistribution(knob.low, knob.high, log=knob.log)


def _short(value: float) -> float:
    """Round to three significant digits."""
    return float(f"{value:.3g}")


def _cost(result: Trial) -> float:
    """Objective to minimize: seconds to target, or, behind all of these, the distance from the target at the end."""
    if result.seconds_to_target is not None:
        return result.seconds_to_target
    gap = math.inf if result.best is None else abs(result.target - result.best)
    return FAR * (1 + min(gap, FAR))
