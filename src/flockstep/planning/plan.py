"""Predicts and ranks all strategies for a job on a cluster, before anything is run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from flockstep import registry
from flockstep.costs.cluster import ClusterShape
from flockstep.errors import ConfigurationError, FlockstepError, Interrupted
from flockstep.planning.criteria import criteria, departures, is_synchronous, lateness, relative_samples
from flockstep.planning.job_profile import JobProfile, Site
from flockstep.planning.step_prediction import ALONE, MOST, StepPrediction, alone, predict_step
from flockstep.report import formatting
from flockstep.report.progress import ProgressCallback, silent
from flockstep.strategies.base import Strategy

COMPOSED = (
    "ps(consistency=ssp(3))",
    "ps(consistency=asynchronous)",
    "ps(consistency=backup(1))",
    "ps(shards=4)",
    "local_sgd(period=4)",
    "local_sgd(period=32)",
    "local_sgd(period=4, outer_optimizer=nesterov)",
    "local_sgd(period=10, outer_optimizer=nesterov)",
    "local_sgd(period=32, outer_optimizer=nesterov)",
    "all_reduce(codec=half)",
    "all_reduce(codec=topk, feedback=residual)",
    "ps(codec=topk, feedback=residual)",
    "powersgd(rank=1)",
)
"""Compositions that a plan considers in addition to the registered strategies."""


@dataclass(frozen=True)
class Outlook:
    """The predictions of a plan: the costs of all strategies for a job on a cluster."""

    site: Site
    workers: int
    predictions: tuple[StepPrediction, ...]
    """Predictions in order of effective samples per second, highest first. Training on one worker is one of the
    predictions.
    """
    refused: tuple[tuple[str, str], ...]
    """Strategies that cannot run on the cluster: name and reason."""
    left_out: tuple[str, ...]
    """Sentences about effects that the predictions ignore."""
    length: float | None = None
    """Duration of the run in seconds, if the user gave a duration; otherwise None."""
    steps: int | None = None
    """Number of steps of a worker in a run of the job; None if only sizes are known, or no machine fails."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Name of a strategy → number of samples that the strategy needed in trials, relative to one worker."""

    @property
    def task(self) -> JobProfile:
        """The profile of the job for which the plan was made."""
        return self.site.task

    @property
    def alone(self) -> StepPrediction:
        """The prediction for training on one worker."""
        return self.named(ALONE)

    def named(self, name: str) -> StepPrediction:
        """Return the prediction for the strategy `name`.

        Raises:
            ConfigurationError: the plan does not have the strategy.
        """
        for found in self.predictions:
            if name in (found.name, str(found.strategy)):
                return found
        raise ConfigurationError(
            f"{name} must be among the strategies of the plan, but is not; choose a strategy that the plan lists"
        )

    def relative_samples(self, found: StepPrediction) -> float:
        """Return the factor by which a strategy needs more samples than one worker for the same accuracy: measured in
        trials, otherwise assumed by a formula.
        """
        return self.measured.get(found.name) or relative_samples(found, self.site)

    def late(self, found: StepPrediction) -> float | None:
        """Return the mean staleness of a strategy's updates in versions; None if the strategy has no versions or all
        workers wait for each other.
        """
        if found.staleness is not None or found.strategy is None or not combines(found):
            return found.staleness
        waits = is_synchronous(found.strategy)
        return None if waits else lateness(found, self.site)

    def document(self) -> dict[str, Any]:
        """Return the predictions as plain data, for JSON."""
        latency, bandwidth = self.site.link
        return {
            "job": self.task.name,
            "cluster": self.site.cluster.name,
            "workers": self.workers,
            "parameters": self.task.elements,
            "batch": self.task.batch,
            "latency": latency,
            "bandwidth": bandwidth if bandwidth < float("inf") else None,
            "strategies": [
                {
                    **found.document(),
                    "departures": list(departures(found, self.site)),
                    "relative_samples": self.relative_samples(found),
                    "criteria": asdict(criteria(found, self.site)),
                }
                for found in self.predictions
            ],
            "refused": [{"name": name, "why": why} for name, why in self.refused],
            "left_out": list(self.left_out),
        }


def plan(
    task: JobProfile,
    cluster: ClusterShape,
    workers: int | None = None,
    *,
    strategies: tuple[str, ...] = (),
    length: float | None = None,
    say: ProgressCallback = silent,
) -> Outlook:
    """Predict the cost of every strategy for a task on a cluster. Nothing is run on the cluster.

    Args:
        task: the profile of the job, with the sizes of the model and the work of a gradient.
        cluster: the machines and links.
        workers: number of workers; None for all workers of the cluster, at most `MOST`.
        strategies: expressions to consider; empty for every registered strategy and some compositions.
        length: seconds that the run lasts; None for the duration of the job's epochs, or a day without a job.
        say: function that is called with each strategy before the strategy is predicted.

    Returns:
        The predictions, sorted by effective samples per second.

    Raises:
        ConfigurationError: the cluster or a plan cannot have this number of workers, or a strategy does not exist.
    """
    site = Site(task, cluster)
    count = min(cluster.workers, MOST) if workers is None else workers
    if count > MOST:
        raise ConfigurationError(
            f"a plan takes at most {MOST:,} workers, got {count:,}; give at most {MOST:,} with --workers"
        )
    site.compute(count)
    found, refused = [alone(site)], list[tuple[str, str]]()
    wanted = list(candidates(strategies, site))
    for number, (name, strategy) in enumerate(wanted):
        say(name, number, len(wanted))
        try:
            _require_sense(strategy, site, count)
            found.append(replace(predict_step(strategy, site, count), name=name))
        except KeyboardInterrupt as stop:
            done = [one for one, _ in wanted[:number]]
            told = f"{number} of {len(wanted)} strategies were finished: {', '.join(done)}; a plan of fewer strategies"
            way = f"{told} takes less time: name strategies with -s, for example -s all_reduce -s local_sgd"
            why = f"{str(stop) or 'interrupted'}; {way if done else 'no strategy was finished'}"
            raise Interrupted(why) from None
        except Interrupted:
            raise
        except FlockstepError as error:  # a custom strategy may end in a deadlock
            refused.append((name, str(error)))
    found.sort(key=lambda one: -one.samples_per_second / relative_samples(one, site))
    steps = task.steps(count) if length is None and cluster.failures else None
    return Outlook(site, count, tuple(found), tuple(refused), left_out(site, count), length, steps)


def candidates(texts: tuple[str, ...], site: Site) -> Iterator[tuple[str, Strategy]]:
    """Return the strategies to consider, each once, with their names: `texts`, or every registered strategy and some
    compositions.

    A name is the alias or system that the user wrote, the alias of a registered strategy, or the expression.

    Raises:
        ConfigurationError: an expression is invalid.
    """
    seen, (latency, bandwidth) = set[Strategy](), site.link
    # An all-reduce that selects its collective by the cluster's latency and bandwidth.
    model = "" if bandwidth == float("inf") else f"(latency={latency:g}, bandwidth={bandwidth:g})"
    fitting = f"all_reduce(collective=auto{model})"
    for text in texts or (*registry.names("strategy"), *COMPOSED, fitting):
        strategy = Strategy.parse(text)
        if strategy not in seen:
            seen.add(strategy)
            written = texts and registry.alias("strategy", text.strip())
            yield (
                text.strip() if written else str(strategy) if texts else registry.short_name("strategy", str(strategy)),
                strategy,
            )


def _require_sense(strategy: Strategy, site: Site, workers: int) -> None:
    """Refuse a strategy that needs a single machine, or matrices, if the site has none."""
    shared = strategy.taxonomy_entry is not None and strategy.taxonomy_entry.topology == "shared memory"
    if shared and len(site.cluster.placed(workers)) > 1:
        raise ConfigurationError(
            "the strategy needs all workers on one machine, but the cluster has several; plan for a cluster of "
            "one machine"
        )
    if strategy.traits.matrices and not any(len(shape) > 1 for shape in site.task.tensors):
        raise ConfigurationError(
            "the strategy factors matrices, but only the size of this model is known; plan for a job instead"
        )


def combines(found: StepPrediction) -> bool:
    """Return whether the predicted strategy makes all workers train one common model."""
    return found.strategy is None or found.sent_bytes > 0


def left_out(site: Site, workers: int) -> tuple[str, ...]:
    """Return sentences about effects that the predictions ignore."""
    said, cluster, machines = site.assumptions(), site.cluster, len(site.cluster.placed(workers))
    if workers > cluster.workers:
        taken = "assumed to share its machines"
        if machines > cluster.nodes:
            taken = f"assumed to run on {machines:,} machines of the same kind instead of {cluster.nodes:,}"
        said.insert(0, f"{cluster.name} has {cluster.workers:,} workers: {workers:,} are {taken}")
    if workers == MOST < cluster.workers:
        said.insert(0, f"a plan takes at most {MOST} of the {cluster.workers:,} workers of {cluster.name}")
    said.append(
        "the number of samples that a strategy actually needs for the same accuracy: where no trial measured the "
        "number, a formula assumes it"
    )
    said.append(
        "the time for reading data, evaluating and starting, and the time taken by the operating system and "
        "other programs"
    )
    if cluster.failures:
        daily = formatting.number(cluster.failures * 86400, 2)
        said.append(
            f"failures: about {daily} a day on all machines together; the advice includes them, but assumes that "
            "servers do not fail"
        )
    said.append("variation between runs: each strategy was rehearsed once; ± is the range of the mean of its steps")
    return tuple(said)
