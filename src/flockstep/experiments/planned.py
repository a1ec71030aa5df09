"""Plans as a function, which predicts time and bytes of every strategy on a cluster, and recommends a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any

from flockstep.costs.cluster_reading import load_cluster, usual_cluster
from flockstep.errors import ConfigurationError
from flockstep.experiments.options import listed, takes
from flockstep.frameworks.job import import_components
from flockstep.launchers.threads import limit_threads
from flockstep.options import Arg, Opt
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


@dataclass(frozen=True)
class PlanOptions:
    """Options of a plan."""

    what: Annotated[
        str | Path,
        Arg(help="A built-in workload, a reference model, or the path of a Python file with a function `job()`."),
    ]
    cluster: Annotated[
        str | Path | None,
        Opt(
            help="A name in `flockstep list clusters`, or the path of a TOML file (default: here if this machine was "
            "calibrated, otherwise laptop)."
        ),
    ] = None
    _: KW_ONLY
    workers: Annotated[int | None, Opt(help="Number of workers (default: all workers of the cluster).")] = None
    require: Annotated[
        Sequence[str],
        Opt(help="Requirements on the run: any of unbalanced, reproducible, elastic, private, slow-links."),
    ] = ()
    strategies: Annotated[Sequence[str], Opt(help="The strategies to consider (default: all).")] = ()
    batch: Annotated[int | None, Opt(help="Samples per worker and step (default: the job's).")] = None
    hours: Annotated[float | None, Opt(help="Duration of the run in hours (default: the job's).")] = None
    imports: Annotated[Sequence[str], Opt(help="Python files that register custom components.")] = ()
    hybrid: Annotated[
        bool,
        Opt(help="Also predict models that are split over workers, and choose partition and strategy together."),
    ] = False
    partitions: Annotated[
        Sequence[str],
        Opt(help='The partitions to consider, such as "pipeline(2, 1f1b, 8)" (default: a search). Implies hybrid.'),
    ] = ()
    memory: Annotated[
        str | None,
        Opt(help='Memory of a worker, such as "16GB" (default: what the cluster states). Implies hybrid.'),
    ] = None
    budget: Annotated[
        float,
        Opt(
            help="CPU seconds for trials, which measure in virtual time how many samples each strategy needs on the "
            "job; 0 for no trials, so that a formula assumes the number. Split models are compared without trials."
        ),
    ] = BUDGET


@takes(PlanOptions)
def plan(options: PlanOptions) -> PlanResult:
    """Predict the cost of every strategy on a cluster, and recommend a strategy, as `flockstep plan` does.

    The call sets the thread limits of the numerical libraries to 1.

    Returns:
        The predictions and the advice.

    Raises:
        ConfigurationError: a job, cluster, requirement or strategy does not exist.
    """
    hours = options.hours
    if hours is not None and not 0 < hours < float("inf"):
        raise ConfigurationError(f"hours must be > 0 and finite, got {hours:g}; leave it out for the length of the job")
    requirements, chosen = listed("require", options.require), listed("strategies", options.strategies)
    require_known(requirements)
    files = listed("imports", options.imports)
    import_components(files)
    length = None if hours is None else 3600 * hours
    splits = HybridOptions.of(options.hybrid, listed("partitions", options.partitions), options.memory, chosen, files)
    where = usual_cluster() if options.cluster is None else options.cluster
    outlook = predicted(
        options.what, where, options.workers, options.batch, chosen, length=length, memory=splits.memory
    )
    if options.budget > 0 and can_be_tried(outlook) and not splits.wanted:
        whole = asked(outlook, requirements)
        out = () if chosen else [one.name for one in outlook.predictions if unfit(one, outlook, whole)]
        split = "by-label" if "unbalanced" in requirements else "iid"
        race = Race(outlook, promising(outlook, leave=out), budget=options.budget, split=split)
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
