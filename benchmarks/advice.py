"""Is the advice right? On known clusters and jobs: the recommended strategy's time to target against the best of all.

For every case of `advice_cases.toml` a plan is made, and `flockstep.planning.advice` recommends a strategy twice: from
the plan alone, and after trials on the job (`flockstep.planning.search`), whose seeds are not those of the runs below.
Then every strategy of the plan that trains one model and keeps what the user demands is run with real gradients in
virtual time until the job's target is reached, and so is one worker. All get the same protocol:

* learning rates: the job's times 1/4, 1 and 4 with the first seed; further factors of 4 while the best is at the end or
  none reaches the target; then twice and half the best one;
* the two quickest rates are run with all seeds; a strategy's time is the lower of their medians;
* where the result is the mean of the workers' models, which nobody has, adding them up once counts, as in every trial;
* a run ends when it takes longer than the strategy's own best or four times the quickest of all so far, and a strategy
  whose first seed takes three times as long as the quickest of all is not run with other seeds. The recommended
  strategies are run without these limits.

A recommendation within 10 % of the best is a hit. Every run is kept in `--out`, so that the command goes on where it
was ended.

`--draw 12 --seed 1` judges other cases, drawn by a seed: job, workers, law of the gradients, uneven speeds, bandwidth,
latency and split of the data.

    python benchmarks/advice.py [--case NAME | --draw 12 --seed 1] [--seeds 5] [--budget 120] [--out FOLDER] [--json]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.costs.cluster_file import read_cluster
from flockstep.errors import FlockstepError
from flockstep.frameworks.base import Job
from flockstep.planning import advice, trials
from flockstep.planning.job_profile import JobProfile, task_of
from flockstep.planning.plan import Outlook, combines, plan
from flockstep.planning.search import BUDGET, Race, promising
from flockstep.planning.step_prediction import ALONE, StepPrediction
from flockstep_lab.claims.digits_perceptron import digits_job

CASES = Path(__file__).with_name("advice_cases.toml")
COARSE = (1.0, 4.0, 0.25)
"""Learning rates, times the job's own."""
LEAST, MOST = 4.0**-4, 4.0**3
"""The lowest and the highest."""
RUSH, SCREEN = 4.0, 3.0
"""Times the quickest so far, after which a run ends, and beyond which a strategy is not run with other seeds."""
APART = 100
"""First seed of the trials on which the advice is based: other draws than those of the runs by which it is judged."""
LIMIT = 4.0
"""Times what one worker takes, after which every run ends."""
STEPS = 6000
"""Of a worker, at the most; the model is evaluated after each, off the clock."""
NEAR = 1.1
"""Times the best, up to which a recommendation is a hit."""
DEMANDS = ("reproducible", "elastic", "private")
"""Needs that nothing may break; what the others rule out, or is never advised, is simulated all the same."""


def nats(outputs: FlatArray, targets: FlatArray) -> float:
    """Mean cross-entropy: unlike the accuracy of a few hundred samples it does not jump, so that times repeat."""
    top = outputs.max(axis=1, keepdims=True)
    logs = outputs - top - np.log(np.exp(outputs - top).sum(axis=1, keepdims=True))
    return float(-np.take_along_axis(logs, targets[:, None], axis=1).mean(dtype=np.float64))


def judged(job: Job, target: float) -> Job:
    """A job whose target is a loss."""
    return replace(job, metric=nats, higher_is_better=False, target=target)


JOBS: dict[str, Callable[[], Job]] = {
    "perceptron": lambda: judged(digits_job("sgd(lr=0.2)", 8), 0.2),
    "small-batches": lambda: judged(digits_job("sgd(lr=0.1)", 2), 0.2),
    "large-batches": lambda: judged(digits_job("sgd(lr=0.2, momentum=0.5)", 32), 0.2),
    "momentum": lambda: judged(digits_job("sgd(lr=0.05, momentum=0.9)", 8), 0.2),
}
"""The digits on 8,970 parameters, in plain numpy: batches of 8, 2 and 32, and momentum."""


@dataclass(frozen=True)
class Case:
    """A job on a cluster, whose best strategy can be found by trying."""

    name: str
    about: str
    shows: str
    tuned: bool
    """Whether the rule was looked at on this case while it was written."""
    job: str
    cluster: str
    split: str = "iid"
    requirements: tuple[str, ...] = ()

    @property
    def outlook(self) -> Outlook:
        """The plan of the case."""
        return plan(self.task, read_cluster(self.cluster, name=self.name))

    @property
    def task(self) -> JobProfile:
        """The sizes of the case's job."""
        return task_of(self.job, imported=JOBS[self.job]() if self.job in JOBS else None)

    @property
    def mark(self) -> str:
        """What the results are of: other jobs and clusters have others."""
        return hashlib.sha256(repr((self.job, self.cluster, self.split, STEPS)).encode()).hexdigest()[:8]


def cases() -> list[Case]:
    """All cases that this file declares."""
    with CASES.open("rb") as file:
        found = tomllib.load(file)
    return [
        Case(name, **{**table, "requirements": tuple(table.get("requirements", ()))}) for name, table in found.items()
    ]


LAWS = (
    "constant({0:.3g})",
    "lognormal({0:.3g}, sigma=0.1)",
    "lognormal({0:.3g}, sigma=0.5)",
    "exponential({0:.3g})",
    "slow_spells(constant({0:.3g}), 0.02, 10, 8)",
    "pareto({0:.3g}, shape=1.8)",
)
"""Of gradients that take so long in the mean; of a drawn case,"""
SPLITS: tuple[tuple[str, tuple[str, ...]], ...] = (("iid", ()), ("iid", ()), ("by_label", ("unbalanced",)))
"""with the requirement that goes with how its data is split."""


def drawn(count: int, seed: int) -> list[Case]:
    """Draw the given number of cases with a seed."""
    random, found = np.random.default_rng(seed), []
    for number in range(count):
        job, law = (one[random.integers(len(one))] for one in (sorted(JOBS), LAWS))
        split, requirements = SPLITS[random.integers(len(SPLITS))]
        workers, slow = int(random.choice([4, 8, 12, 16])), float(random.choice([1.0, 1.0, 0.25, 0.5]))
        bits, delay, mean = (10 ** random.uniform(*ends) for ends in ((5.5, 10), (-5, -1.5), (-2.5, 0)))
        half = workers // 2
        cluster = f"""compute = "{law.format(mean)}"
[nodes.some]
count = {half}
[nodes.others]
count = {workers - half}
speed = {slow}
[[links]]
inside = ["some", "others"]
bandwidth = "{bits / 1e6:.3g}mbit"
latency = "{delay * 1e6:.3g}us"
"""
        about = f"{workers} workers, half of them at speed {slow:g}"
        found.append(Case(f"drawn-{seed}-{number}", about, "other", False, job, cluster, split, requirements))
    return found


@dataclass
class Truth:
    """What the strategies of a case take to the target, as far as they were run; kept in a file, a line a run."""

    case: Case
    outlook: Outlook
    file: Path
    known: dict[tuple[str, float, int], list[tuple[float, float]]] = field(default_factory=dict)
    """Strategy, rate, seed → of each run how long it was given and how long it took, infinite if it did not arrive."""

    def __post_init__(self) -> None:
        self.context = trials.TrialContext(self.outlook.site)
        self.base = self.context.engine(0).optimizer.lr
        if self.file.exists():
            for line in self.file.read_text().splitlines():
                name, rate, seed, given, took = json.loads(line)
                self._keep(name, rate, seed, given or math.inf, took or math.inf)
        self.limit = math.inf
        self.limit = LIMIT * min(self.seconds(self.outlook.alone, rate, 0, math.inf) for rate in COARSE)

    def _keep(self, name: str, rate: float, seed: int, given: float, took: float) -> None:
        self.known.setdefault((name, rate, seed), []).append((given, took))

    def seconds(self, found: StepPrediction, rate: float, seed: int, within: float) -> float:
        """Virtual seconds to the target; infinite where it takes more than `within`."""
        within = min(within, self.limit)
        for given, took in self.known.get((found.name, rate, seed), []):
            if took < math.inf or given >= within:
                return took if took <= within else math.inf
        site, split = self.outlook.site, self.case.split
        try:
            trial = trials.trial(
                site,
                found.strategy,
                self.outlook.workers,
                trials.TrialSettings(
                    lr=rate * self.base,
                    seed=seed,
                    steps=STEPS,
                    within=within,
                    split=split if found.strategy is not None else "iid",
                    every=1 if found.strategy is not None else 2,
                    live=True,
                ),
                context=self.context,
            )
            given, took = math.inf if trial.end == "diverged" else within, trial.seconds_to_target or math.inf
        except FlockstepError as error:  # a strategy that breaks is told and loses
            print(f"  {found.name}: {type(error).__name__}: {error}")
            given, took = math.inf, math.inf
        self._keep(found.name, rate, seed, given, took)
        line = [found.name, rate, seed, *(None if math.isinf(one) else one for one in (given, took))]
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return took

    def first(self, found: StepPrediction, quickest: float) -> dict[float, float]:
        """Rate → seconds with the first seed, of those that reached the target in time."""
        reached: dict[float, float] = {}
        rates = COARSE

        def attempt(rate: float) -> None:
            took = self.seconds(found, rate, 0, min([RUSH * quickest, *reached.values()]))
            if took < math.inf:
                reached[rate] = took

        for rate in rates:
            attempt(rate)
        while (not reached or min(reached, key=reached.__getitem__) == min(rates)) and min(rates) > LEAST:
            rates = (*rates, min(rates) / 4)
            attempt(rates[-1])
        while reached and min(reached, key=reached.__getitem__) == max(rates) < MOST:
            rates = (*rates, max(rates) * 4)
            attempt(rates[-1])
        if reached:
            best = min(reached, key=reached.__getitem__)
            attempt(best * 2)
            attempt(best / 2)
        return reached

    def all_seeds(self, found: StepPrediction, reached: dict[float, float], seeds: int) -> tuple[float, float]:
        """Median over the seeds and the rate of the better one of the two quickest rates."""
        tried = []
        for rate in sorted(reached, key=reached.__getitem__)[:2]:
            times = [self.seconds(found, rate, seed, math.inf) for seed in range(seeds)]
            tried.append((statistics.median(times), rate * self.base))
        return min(tried, default=(math.inf, math.nan))


def judge(case: Case, seeds: int, budget: float, folder: Path) -> dict[str, Any]:
    """The two recommendations of a case beside the best of all."""
    began = time.process_time()
    outlook = case.outlook
    planned = advice.advise(outlook, case.requirements)
    took = {"plan": time.process_time() - began}
    unfit = [one.name for one in outlook.predictions if advice.unfit(one, outlook, case.requirements)]
    race = Race(outlook, promising(outlook, leave=unfit), budget=budget, seed=APART, split=case.split)
    race.run()
    took["trials"] = race.spent
    measured = advice.advise(outlook, case.requirements, race.found, race.asked)
    truth = Truth(case, outlook, folder / f"{case.name}-{case.mark}.jsonl")
    demands = tuple(one for one in case.requirements if one in DEMANDS)
    allowed = [one for one in outlook.predictions if combines(one)]
    allowed = [one for one in allowed if advice.unfit(one, outlook, demands) in (None, advice.DROPS)]
    ranked = sorted(allowed, key=lambda one: -advice.value(one, outlook, case.requirements))
    ranked.sort(key=lambda one: one.name != planned.choice.name)
    quickest, first = math.inf, {}
    for found in ranked:
        first[found.name] = truth.first(found, quickest)
        quickest = min([quickest, *first[found.name].values()])
    told = {found.name: found for found in ranked}
    tuned = {
        name: truth.all_seeds(told[name], reached, seeds)
        for name, reached in first.items()
        if reached and min(reached.values()) <= SCREEN * quickest
    }
    for name in {planned.choice.name, measured.choice.name, ALONE} - set(tuned):
        tuned[name] = truth.all_seeds(told[name], truth.first(told[name], math.inf), seeds)
    best = min(tuned, key=lambda name: tuned[name][0])
    order = sorted(tuned, key=lambda name: tuned[name][0])
    return {
        "case": case.name,
        "shows": case.shows,
        "tuned": case.tuned,
        "workers": outlook.workers,
        **{
            which: {
                "strategy": name,
                "seconds": tuned[name][0],
                "lr": tuned[name][1],
                "ratio": tuned[name][0] / tuned[best][0],
                "hit": tuned[name][0] <= NEAR * tuned[best][0],
            }
            for which, name in (
                ("planned", planned.choice.name),
                ("measured", measured.choice.name),
                ("best", best),
                ("alone", ALONE),
            )
        },
        "said": measured.sentences[0],
        "cpu": took,
        "partial": race.out_of_budget,
        "times": {name: tuned[name][0] for name in order},
        "first": {name: min(reached.values(), default=None) for name, reached in first.items()},
        "runs": len(truth.known),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", action="append", help="Only this one; repeatable.")
    parser.add_argument(
        "--draw", type=int, default=0, help="So many cases drawn by --seed, in place of those declared."
    )
    parser.add_argument("--seed", type=int, default=0, help="Seed of the draw.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=BUDGET, help="CPU seconds for the trials of a recommendation.")
    parser.add_argument("--out", type=Path, default=Path("runs/advice"), help="Where every run is kept.")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    known = {case.name: case for case in (drawn(options.draw, options.seed) if options.draw else cases())}
    for name in options.case or ():
        if name not in known:
            parser.error(f"--case must be one of {', '.join(known)}, got {name}")
    options.out.mkdir(parents=True, exist_ok=True)
    results = []
    for name in options.case or known:
        result = judge(known[name], options.seeds, options.budget, options.out)
        results.append(result)
        if not options.json:
            show(result)
    if options.json:
        print(json.dumps(results, indent=1))
        return
    for which, what in (("planned", "from the plan alone"), ("measured", "after trials")):
        for tuned in (True, False):
            some = [one for one in results if one["tuned"] == tuned]
            hits = sum(one[which]["hit"] for one in some)
            print(f"{what}, {'seen while tuning' if tuned else 'held out'}: {hits} of {len(some)} within 10 %")


def show(result: dict[str, Any]) -> None:
    best = result["best"]
    print(f"{result['case']} ({result['shows']}; {'seen' if result['tuned'] else 'held out'}; {result['runs']} runs)")
    print("  {said}\n  CPU seconds: plan {plan:.1f}, trials {trials:.1f}".format(said=result["said"], **result["cpu"]))
    for which in ("planned", "measured", "best", "alone"):
        one = result[which]
        verdict = "" if one is best else f"  {one['ratio']:5.2f}  {'ok' if one['hit'] else 'MISS'}"
        print(f"  {which:10} {one['strategy']:45} {one['seconds']:10.4g} s  lr {one['lr']:<8.3g}{verdict}", flush=True)


if __name__ == "__main__":
    main()
