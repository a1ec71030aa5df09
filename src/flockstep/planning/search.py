"""Measures on a job how fast strategies train: short trials in virtual time, each at its best learning rate."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from flockstep.errors import ConfigurationError, RunError
from flockstep.planning.plan import Outlook, combines
from flockstep.planning.step_prediction import ALONE, StepPrediction
from flockstep.planning.trial_store import TrialStore
from flockstep.planning.trials import Trial, TrialContext, TrialSettings, trial
from flockstep.report import formatting
from flockstep.report.progress import ProgressCallback, silent

FIRST = 500
"""Largest number of steps after which the loss of one worker is the first loss, which trials have to reach."""
RATES = (1.0, 4.0, 0.25)
"""Learning rates that are tried first, as multiples of the job's learning rate."""
SHARE = 0.05
"""Share of the budget that the steps to the first loss may take, at one learning rate."""
SPAN = 4.0**4
"""Largest multiple, and largest divisor, of the job's learning rate that is tried."""
RUSH = 1.5
"""Limit on the virtual seconds of a trial, as a multiple of the shortest time to the goal so far."""
SLACK = 4.0
"""Limit on the virtual seconds of a trial of one worker with another seed, as a multiple of the first seed's."""
NEAR = 1.25
"""Time to the goal, as a multiple of the shortest, up to which a strategy is tried with further rates and seeds."""
SEEDS = 3
"""Number of seeds with which the strategies near the best are tried."""
BUDGET = 120.0
"""Default budget of all trials, in CPU seconds."""
HELD = 1e9
"""Largest size in bytes of the models of all workers together with which a plan measures a job without being asked to.
"""
FAR = 1e9
"""Cost of a trial that missed the goal, to which the distance from the goal is added."""


@dataclass(frozen=True)
class Found:
    """The trials of one strategy of the plan."""

    strategy: str
    """Name of the strategy in the plan."""
    trials: tuple[Trial, ...]
    """Trials in the order in which they ran."""
    refused: str | None = None
    """Reason why there are no trials, or no further trials, of the strategy."""

    @property
    def at_best_rate(self) -> tuple[Trial, ...]:
        """The trials with the best learning rate, fastest first: one for each seed."""
        by_rate: dict[float, list[Trial]] = {}
        for one in self.trials:
            by_rate.setdefault(one.lr, []).append(one)
        # Only the best learning rate was tried with further seeds.
        best = min(by_rate.values(), key=lambda runs: (-len(runs), _cost(runs[0])), default=[])
        return tuple(sorted(best, key=_cost))

    @property
    def best(self) -> Trial | None:
        """The median trial of the best learning rate; None without trials."""
        runs = self.at_best_rate
        return runs[len(runs) // 2] if runs else None

    @property
    def seconds(self) -> float | None:
        """Median over the seeds of the virtual seconds to the goal; None if the goal was missed."""
        return None if self.best is None else self.best.seconds_to_target

    @property
    def range(self) -> tuple[float, float]:
        """Shortest and longest time to the goal over the seeds; infinite for a seed that missed the goal."""
        times = [math.inf if one.seconds_to_target is None else one.seconds_to_target for one in self.at_best_rate]
        return min(times, default=math.inf), max(times, default=math.inf)

    def document(self) -> dict[str, Any]:
        """Return the trials as plain data, for JSON."""
        best = self.best
        return {
            "strategy": self.strategy,
            "seconds_to_target": self.seconds,
            "range": [one if math.isfinite(one) else None for one in self.range],
            "best": None if best is None else asdict(best),
            "trials": list(map(asdict, self.trials)),
            "refused": self.refused,
        }


def measured(outlook: Outlook, found: Sequence[Found]) -> Outlook:
    """Return the plan with the number of samples that tried strategies needed in place of the assumed number."""
    alone = next((one.seconds for one in found if one.strategy == ALONE), None)
    if alone is None:
        return outlook
    single = outlook.alone.samples_per_second
    needed = {
        one.strategy: outlook.named(one.strategy).samples_per_second / single * one.seconds / alone
        for one in found
        if one.seconds is not None
    }
    return replace(outlook, measured=needed)


def can_be_tried(outlook: Outlook) -> bool:
    """Return whether a plan measures its job without being asked to: there are data and several workers, and the models
    of all workers together are small.
    """
    workers, task = outlook.workers, outlook.task
    return task.job is not None and workers > 1 and workers * task.nbytes <= HELD


def promising(outlook: Outlook, top: int | None = None, leave: Iterable[str] = ()) -> tuple[StepPrediction, ...]:
    """Return one worker, and the strategies with the highest predicted speed-up, except the strategies in `leave`;
    `top` limits their number.

    Raises:
        ConfigurationError: `top` is below 1.
    """
    if top is not None and top < 1:
        raise ConfigurationError(f"top must be >= 1 strategy, got {top}; 5 is usual")
    out = set(leave)
    fit = [one for one in outlook.predictions if one.strategy is not None and combines(one) and one.name not in out]
    return (outlook.alone, *sorted(fit, key=lambda one: -one.samples_per_second / outlook.relative_samples(one))[:top])


@dataclass
class Race:
    """Trials of several strategies to one goal. Results are available at any time, even after an interruption.

    One worker comes first, at its best learning rate. A strategy follows if it could be faster than the fastest so far
    without needing more samples than one worker. All strategies share the first seed; the strategies near the best are
    tried with further learning rates and further seeds. A trial ends when it takes `RUSH` times as long as the fastest
    so far.
    """

    outlook: Outlook
    candidates: Sequence[StepPrediction]
    """One worker, then the strategies in the order of the trials."""
    target: float | None = None
    """Metric that is the goal; None for the first loss, which one worker reaches within `FIRST` steps."""
    budget: float | None = BUDGET
    """CPU seconds after which no trial goes on, except the first of one worker; None for no limit."""
    seed: int = 0
    split: str = "iid"
    context: TrialContext | None = None
    kept: TrialStore = field(default_factory=TrialStore)
    """Trials of an earlier race with the same settings, which take none of the budget."""
    out_of_budget: bool = False
    goal: float | None = None
    """The target, or the first loss; None until it is known."""
    _found: dict[str, Found] = field(default_factory=dict)
    _beaten: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.budget is not None and not self.budget > 0:
            raise ConfigurationError(f"a budget must be > 0 s of CPU time, got {self.budget:g}; 120 s are usual")
        self._context = self.context or TrialContext(self.outlook.site)
        self._lr = self._context.engine(self.seed).optimizer.lr
        if math.isnan(self._lr):
            raise ConfigurationError(
                "trials change the learning rate, but only optax knows the learning rate of this job's optimizer; use "
                "for example optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), or plan with --budget 0"
            )
        self._began = time.process_time()

    @property
    def found(self) -> tuple[Found, ...]:
        """The trials of every strategy that was tried, or that refused a trial."""
        return tuple(self._found.values())

    def notes(self) -> tuple[str, ...]:
        """Return sentences about the goal, the CPU time and the folder of the trials."""
        saved = self.kept.folder
        goal = "" if self.goal is None else f" to a {'loss' if self.target is None else 'metric'} of {self.goal:.3g}"
        budget = "" if self.budget is None else f" of a budget of {self.budget:g} s, which --budget changes"
        said = [f"trials{goal} took {self.spent:.0f} s of CPU time{budget}"]
        if self.out_of_budget:
            again = "" if saved is None else f"; to continue, repeat the command with --keep {saved}"
            said.append(f"the budget was used up before the trials were finished{again}")
        if saved is not None:
            said.append(f"trials are saved in {saved}")
        return tuple(said)

    @property
    def spent(self) -> float:
        """CPU seconds since the race began."""
        return time.process_time() - self._began

    @property
    def asked(self) -> tuple[str, ...]:
        """Names of the strategies whose speed a whole race measures: all that could be the fastest."""
        return tuple(one.name for one in self.candidates if one.name not in self._beaten)

    def run(self, say: ProgressCallback = silent) -> tuple[Found, ...]:
        """Run the trials until the race is decided or the budget is spent.

        Raises:
            ConfigurationError: there is no data to train with.
        """
        self._say = say
        try:
            self._run()
        except _OutOfBudget:
            self.out_of_budget = True
        return self.found

    def _run(self) -> None:
        alone, *others = self.candidates
        self.goal = self.target
        start = 1.0 if self.target is not None else self._first_loss()
        self._tune(alone, [start, start * 4, start / 4])
        single = self._found[alone.name].seconds or math.inf
        for one in others:
            # The number of samples can only be as small as that of one worker, so the rate alone decides.
            if single * (alone.samples_per_second / one.samples_per_second) > self._fastest:
                self._beaten.add(one.name)
            else:
                self._tune(one, list(RATES))
        for one in self._near(alone):
            best = self._found[one.name].best
            if best is not None and best.seconds_to_target is not None:
                for lr in (best.lr * 2, best.lr / 2):
                    self._attempt(one, lr, self.seed)
        front = self._near(alone)
        for seed in range(self.seed + 1, self.seed + SEEDS):
            for one in front:
                best = self._found[one.name].best
                assert best is not None
                self._attempt(one, best.lr, seed)

    def _first_loss(self) -> float:
        """Set the goal, and return the learning rate at which one worker reaches it first, as a multiple of the job's:
        the loss at the job's target, or after `FIRST` steps if these come earlier.
        """
        job = self._context.job(self.seed)
        steps = FIRST if self.budget is None else min(FIRST, int(SHARE * self.budget / self._step()))
        if steps < 1:
            raise _OutOfBudget

        def reached(factor: float) -> tuple[float, float]:
            settings = TrialSettings(job.target or 0.0, job.target is None, factor * self._lr, self.seed, steps)
            one = trial(self.outlook.site, None, 1, settings, context=self._context)
            return one.seconds_to_target or math.inf, math.inf if one.loss is None else one.loss

        results = _widened([*RATES], reached)
        best = min(results, key=results.__getitem__)
        if not math.isfinite(results[best][1]):
            raise ConfigurationError(
                f"one worker diverges with every learning rate from {min(results) * self._lr:g} to "
                f"{max(results) * self._lr:g}; give the job's optimizer another learning rate, or plan with --budget 0"
            )
        self.goal = results[best][1]
        return best

    def _step(self) -> float:
        """CPU seconds of a step of one worker, without what only the first steps take."""
        spent = math.inf
        for _ in range(2):
            before = self.spent
            settings = TrialSettings(0.0, by_loss=True, seed=self.seed, steps=2)
            trial(self.outlook.site, None, 1, settings, context=self._context)
            spent = min(spent, (self.spent - before) / 2)
        return max(spent, 1e-9)

    @property
    def _fastest(self) -> float:
        return min((one.seconds for one in self.found if one.seconds is not None), default=math.inf)

    def _near(self, alone: StepPrediction) -> list[StepPrediction]:
        """One worker, which every speed-up refers to, and the strategies near the fastest, fastest first."""
        times = {one.strategy: one.seconds or math.inf for one in self.found if one.refused is None}
        limit = NEAR * self._fastest
        near = [one for one in self.candidates if times.get(one.name, math.inf) <= limit or one is alone]
        return sorted(near, key=lambda one: times.get(one.name, math.inf))

    def _tune(self, one: StepPrediction, factors: list[float]) -> None:
        """Try a strategy with these multiples of the job's learning rate, and with more while the best is at an end."""

        def cost(factor: float) -> float:
            done = self._attempt(one, factor * self._lr, self.seed)
            return math.inf if done is None else _cost(done)

        _widened(factors, cost)

    def _attempt(self, one: StepPrediction, lr: float, seed: int) -> Trial | None:
        """Run one trial; None if the strategy refuses it."""
        before = self._found.get(one.name, Found(one.name, ()))
        if before.refused is not None:
            return None
        own, fastest, alone = before.seconds or math.inf, self._fastest, one.strategy is None
        # A rate that is slower than the strategy's best cannot become the best; another seed may well be slower.
        within = min(own if seed == self.seed else math.inf, SLACK * own if alone else RUSH * fastest)
        done = self.kept.find(one.name, lr, seed, within)
        best = f"; fastest so far: {formatting.seconds(fastest)}" if math.isfinite(fastest) else ""
        self._say(f"trial of {one.name}, learning rate {lr:g}, seed {seed}{best}", self.spent, self.budget or 0)
        try:
            if done is None:
                split = "iid" if alone else self.split
                goal = TrialSettings(self.goal, self.target is None, lr, seed, within=within, split=split, live=True)
                site, workers = self.outlook.site, self.outlook.workers
                done = trial(site, one.strategy, workers, goal, context=self._context, heed=self._heed)
                self.kept.add(done, lr, within)
        except (ConfigurationError, RunError) as error:
            if alone:
                raise
            self._found[one.name] = Found(one.name, before.trials, str(error))
            return None
        self._found[one.name] = Found(one.name, (*before.trials, done))
        return done

    def _heed(self, steps: float, seconds: float) -> None:
        if self.budget is not None and self._found and self.spent > self.budget:
            raise _OutOfBudget


class _OutOfBudget(Exception):
    """Raised when the CPU time of a race is used up."""


def _widened(factors: list[float], cost: Any) -> dict[float, Any]:
    """Return the cost of every factor, and of further factors of 4 while the best is at an end."""
    tried = {factor: cost(factor) for factor in factors}
    while True:
        best = min(tried, key=tried.__getitem__)
        beyond = best * 4 if best == max(tried) else best / 4 if best == min(tried) else 0.0
        if not 1 / SPAN <= beyond <= SPAN:
            return tried
        tried[beyond] = cost(beyond)


def _cost(result: Trial) -> float:
    """Seconds to the goal, or, behind all of these, the distance from the goal at the end."""
    if result.seconds_to_target is not None:
        return result.seconds_to_target
    gap = math.inf if result.best is None else abs(result.target - result.best)
    return FAR * (1 + min(gap, FAR))
