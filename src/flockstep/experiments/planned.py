"""Plans as a function, which predicts time and bytes of every strategy on a cluster, and recommends a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flockstep.costs.cluster_reading import load_cluster, usual_cluster
from flockstep.errors import ConfigurationError
from flockstep.experiments.options import listed
from flockstep.frameworks.job import import_components
from flockstep.launchers.threads import limit_threads
from flockstep.planning.advice import Advice, advise, asked, require_known, unfit
from flockstep.planning.hybrid import HybridAdvice, HybridOptions, advise_hybrid
from flockstep.planning.job_profile import task_of
from flockstep.planning.plan import Outlook
from flockstep.planning.plan import plan as predict
from flockstep.planning.search import BUDGET, Race, can_be_tried, measured, promising
from flockstep.report.progress import ProgressCallback, silent


@dataclass(frozen=True)
class PlanResult:
    """The result of a plan: predictions for a job on a cluster, and advice based on them. `print` shows the advice."""

    outlook: Outlook
    """The predictions for all strategies."""
    advice: Advice
    """The recommendation, its reasons, and the conditions under which it would change."""
    hybrid: HybridAdvice | None = None
    """The choice between whole and split replicas; None if the plan covers only whole replicas."""
    trials: Race | None = None
    """The trials that measured the job; None if a formula assumes how many samples each strategy needs."""

    @property
    def choice(self) -> str | None:
        """The recommended strategy as an expression; None if no strategy meets the requirements."""
        return None if self.advice.choice is None else self.advice.choice.name

    def document(self) -> dict[str, Any]:
        """Return the plan as plain data, for JSON. Strategies are sorted by their predicted speed-up, highest first."""
        document = self.outlook.document()
        rows = [{**one, "speedup": self.advice.speedups[one["name"]]} for one in document["strategies"]]
        rows.sort(key=lambda one: -one["speedup"])
        found = {**document, "strategies": rows, "advice": self.advice.document()}
        if self.trials is not None:
            found["trials"] = self.trials.document()
        return found if self.hybrid is None else {**found, "hybrid": self.hybrid.document()}

    def write(self, path: Path | str) -> Path:
        """Write the plan as one HTML file, and return the path of the file."""
        from flockstep.planning.page import write_plan

        advice = self.advice if self.hybrid is None else self.hybrid.together(self.advice)
        write_plan(self.outlook, advice, Path(path), ())
        return Path(path)

    def __str__(self) -> str:
        advice = self.advice if self.hybrid is None else self.hybrid.together(self.advice)
        command = [] if self.hybrid is None or self.hybrid.command is None else [self.hybrid.command]
        return "\n".join([*advice.sentences, *command, *(f"- {reason}" for reason in advice.reasons)])


def plan(
    what: str | Path,
    cluster: str | Path | None = None,
    *,
    workers: int | None = None,
    require: Sequence[str] = (),
    strategies: Sequence[str] = (),
    batch: int | None = None,
    hours: float | None = None,
    imports: Sequence[str] = (),
    hybrid: bool = False,
    partitions: Sequence[str] = (),
    memory: str | None = None,
    budget: float = BUDGET,
) -> PlanResult:
    """Predict the cost of every strategy on a cluster, and recommend a strategy, as `flockstep plan` does.

    The call sets the thread limits of the numerical libraries to 1.

    Args:
        what: a built-in workload, a reference model, or the path of a Python file with a function `job()`.
        cluster: a name in `flockstep list clusters`, or the path of a TOML file; None for "here" if this machine was
            calibrated, otherwise "laptop".
        workers: number of workers; None for all workers of the cluster.
        require: requirements on the run: any of unbalanced, reproducible, elastic, private, slow-links.
        strategies: the strategies to consider; empty for all.
        batch: samples per worker and step; None for the job's value. hours: duration of the run in hours; None for the
            job's value.
        imports: Python files that register custom components.
        hybrid: also predict models that are split over workers, and choose partition and strategy together.
        partitions: the partitions to consider, such as "pipeline(2, 1f1b, 8)"; empty for a search. Implies `hybrid`.
        memory: memory of a worker, such as "16GB"; None for the memory that the cluster states. Implies `hybrid`.
        budget: CPU seconds for trials, which measure in virtual time how many samples each strategy needs on the job; 0
            for no trials, so that a formula assumes the number. Split models are compared without trials.

    Returns:
        The predictions and the advice.

    Raises:
        ConfigurationError: a job, cluster, requirement or strategy does not exist.
    """
    if hours is not None and not 0 < hours < float("inf"):
        raise ConfigurationError(f"hours must be > 0 and finite, got {hours:g}; leave it out for the length of the job")
    requirements, chosen = listed("require", require), listed("strategies", strategies)
    require_known(requirements)
    files = listed("imports", imports)
    import_components(files)
    length = None if hours is None else 3600 * hours
    splits = HybridOptions.of(hybrid, listed("partitions", partitions), memory, chosen, files)
    where = usual_cluster() if cluster is None else cluster
    outlook = predicted(what, where, workers, batch, chosen, length, memory=splits.memory)
    if budget > 0 and can_be_tried(outlook) and not splits.wanted:
        whole = asked(outlook, requirements)
        out = () if chosen else [one.name for one in outlook.predictions if unfit(one, outlook, whole)]
        split = "by-label" if "unbalanced" in requirements else "iid"
        race = Race(outlook, promising(outlook, leave=out), budget=budget, split=split)
        race.run()
        outlook = measured(outlook, race.found)
        return PlanResult(outlook, advise(outlook, requirements, race.found, race.asked), trials=race)
    advice = advise(outlook, requirements)
    return PlanResult(outlook, advice, advise_hybrid(outlook, advice, splits) if splits.wanted else None)


def predicted(
    what: str | Path,
    cluster: str | Path,
    workers: int | None = None,
    batch: int | None = None,
    strategies: tuple[str, ...] = (),
    length: float | None = None,
    say: ProgressCallback = silent,
    memory: float | None = None,
) -> Outlook:
    """Predict the cost of every strategy, or only of `strategies`, for a job on a cluster. `say` is called with a line
    about the current task.

    `length` is the duration of the run in seconds; None for the job's duration. `memory` is the memory of a worker in
    bytes; None for the memory that the cluster states.

    Raises:
        ConfigurationError: there is no such job, cluster or strategy, or none of `strategies` can run.
    """
    shape = load_cluster(cluster)
    if memory is not None:
        shape = shape.with_memory(memory)
    say(f"reading {what}")
    task = task_of(str(what), batch)
    limit_threads(1)  # a rehearsal's products of small matrices only wait for other threads
    found = predict(task, shape, workers, strategies=strategies, length=length, say=say)
    if strategies and len(found.predictions) == 1:
        why = "; ".join(f"{name}: {reason}" for name, reason in found.refused)
        raise ConfigurationError(f"none of the strategies can be planned on {shape.name}: {why}")
    return found
