"""Where every consistency rule lets four workers with different optima settle, by compute law and straggler.

Three workers have their optimum at 0 and the last one at 1; every gradient counts the same, so the parameter settles at
0.25 where all workers give as many gradients, and elsewhere at the last worker's share of them. One row per run: the
rule, the compute law, which worker takes twice as long, the mean of the parameter over time, each worker's share of the
gradients applied meanwhile, and the weights at which each worker's gradients were applied, in learning rates.

    python benchmarks/bowls.py [--steps 200] [--optimizer 'sgd(lr=0.03)'] [RULE ...]
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.numpy import QuadraticModel
from flockstep.records.events import Event, ScalarEvent, StepEvent, UpdateEvent
from flockstep.testing.strategies import Watched, run_strategy

RULES = (
    "bsp", "ssp(3)", "cached_ssp(3)", "essp(3)", "ssp(3, weight=sum)", "bounded_delay(3)",
    "bounded_delay(3, weight=sum)", "value_bound(0.1)", "backup(1)",
    "k_sync(2)", "k_batch_sync(3)", "k_async(2)", "k_batch_async(3)", "softsync(2)", "asynchronous",
)  # fmt: skip


OPTIMA = (0.0, 0.0, 0.0, 1.0)
"""The optimum of each worker's quadratic; that of their mean is 0.25."""
LAWS = ("constant(0.1)", "exponential(0.1)")
Straggler = Literal["none", "first", "last"]
STRAGGLERS: dict[Straggler, tuple[int, ...]] = {"none": (1, 1, 1, 1), "first": (2, 1, 1, 1), "last": (1, 1, 1, 2)}
"""Which worker takes twice as long for a gradient → the factors of all workers."""
SAMPLES = 8


@dataclass(frozen=True)
class Bowl:
    """Where one run settled, and what each worker's gradients weighed."""

    mean: float
    """Mean of the server's parameter over time, while every worker had steps left, the first third left out."""
    shares: tuple[float, ...]
    """Each worker's share of all gradients applied in that time, by rank."""
    weights: dict[int, set[float]]
    """Rank → the weights, in learning rates, at which its gradients were applied in the whole run."""

    @property
    def pull(self) -> float:
        """The mean of the optima, weighted by the number of gradients from each worker: where equal weights settle."""
        return float(np.dot(self.shares, OPTIMA))


class _Traced(Watched):
    """A simulation that keeps the server's parameter after every update, as a figure."""

    def note(self, event: Event) -> None:
        """Store an event together with the parameter."""
        super().note(event)
        if isinstance(event, UpdateEvent):
            super().note(
                ScalarEvent(event.seconds, event.node, "parameter", float(self.runners[event.node].node.params[0]))
            )


def bowl(
    strategy: str,
    law: str = LAWS[0],
    straggler: Straggler = "none",
    steps: int = 200,
    optimizer: str = "sgd(lr=0.03)",
) -> Bowl:
    """Run a strategy that has one server on the bowls, in virtual time and without noise in the gradients."""
    x = np.repeat(OPTIMA, SAMPLES)[:, None]
    data = Data(x, np.zeros(len(x)), x, np.zeros(len(x)))
    job = Job(
        lambda: QuadraticModel(np.ones(1), np.full(1, np.mean(OPTIMA)), "float64"),
        lambda: data,
        optimizer,
        metric=lambda outputs, targets: float(np.mean(np.square(outputs))),
        higher_is_better=False,
        batch=SAMPLES,
    )
    compute = f"speeds({law}, {STRAGGLERS[straggler]})"
    run = run_strategy(strategy, len(OPTIMA), steps, job=job, compute=compute, network="ideal", simulation=_Traced)
    stop = min(event.seconds for event in run.of(StepEvent) if event.step == steps)
    updates = run.of(UpdateEvent)
    counts = Counter(update.source for update in updates if stop / 3 < update.seconds <= stop)
    weights: dict[int, set[float]] = {rank: set() for rank in range(len(OPTIMA))}
    for update in updates:
        assert update.source is not None
        assert update.weight is not None
        weights[update.source].add(update.weight)
    shares = tuple(counts[rank] / counts.total() for rank in range(len(OPTIMA)))
    return Bowl(_mean_over_time(run.of(ScalarEvent), stop / 3, stop), shares, weights)


def _mean_over_time(figures: Sequence[ScalarEvent], start: float, stop: float) -> float:
    """The time average, from `start` to `stop`, of a figure that is noted whenever it has changed."""
    times = np.clip([figure.seconds for figure in figures] + [stop], start, stop)
    return float(np.diff(times) @ np.array([figure.value for figure in figures])) / (stop - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("rules", nargs="*", default=RULES, metavar="RULE")
    parser.add_argument("--steps", type=int, default=200, help="steps of each worker")
    parser.add_argument("--optimizer", default="sgd(lr=0.03)")
    options = parser.parse_args()
    print(
        f"{'rule':<29}{'compute':<18}{'straggler':<11}{'mean of w':<11}{'share of gradients':<25}weight of a gradient"
    )
    for rule in options.rules:
        for law in LAWS:
            for straggler in STRAGGLERS:
                found = bowl(f"ps({rule})", law, straggler, options.steps, options.optimizer)
                shares = " ".join(f"{share:.3f}" for share in found.shares)
                weights = "  ".join(_range(each) for each in found.weights.values())
                print(f"{rule:<29}{law:<18}{straggler:<11}{found.mean:<11.3f}{shares:<25}{weights}")


def _range(weights: set[float]) -> str:
    """The weights of one worker's gradients: a single number where all are equal."""
    if not weights:
        return "none"
    least, most = f"{min(weights):.3f}", f"{max(weights):.3f}"
    return least if least == most else f"{least}-{most}"


if __name__ == "__main__":
    main()
