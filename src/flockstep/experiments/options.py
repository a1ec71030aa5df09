"""The options of the functions and commands that run something, and the run configuration that follows from them."""

from __future__ import annotations

import functools
import inspect
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

from flockstep.errors import ConfigurationError, UnknownName, require
from flockstep.options import (
    Arg,
    BadGradientOptions,
    CheckpointOptions,
    CommonOptions,
    DistributionOptions,
    Opt,
    ProcessOptions,
    ScriptArguments,
    SealedOptions,
    TrainingOptions,
    VirtualTimeOptions,
    Workers,
    options_of,
    options_of_kind,
    require_numbers,
)

if TYPE_CHECKING:
    from flockstep.records.config import Kind, RunConfig
    from flockstep.strategies.base import Strategy
else:
    Strategy = str

P = ParamSpec("P")
S = TypeVar("S")
R = TypeVar("R")
T = TypeVar("T")
Watch = Callable[[int, int, float], None]
"""Function that is called with the steps of all workers that are done, their total, and virtual seconds."""
FOR_JOBS = (
    "is for jobs, and a script without job() sets this itself; pass it to the script after --, as in -- --lr 0.1 (in "
    "Python, arguments=[…])"
)
FOR_SCRIPTS = "is for scripts; leave it out"
IN_VIRTUAL_TIME = "has an effect in virtual time only; add --simulate (in Python, simulated=True), which needs a job"
ON_PROCESSES = "is for real processes only; leave out either it or --simulate (in Python, simulated=True)"
Out = Annotated[Path | str | None, Opt("Folder for the record (default: a new folder in runs/).", panel="Output")]
JOB = Arg(
    "A built-in workload (see `flockstep list workloads`), a Python file with a job() function, or a file that "
    "flockstep seal wrote.",
    nouns=("workload",),
)
STRATEGY = Opt(
    "How the workers coordinate, e.g. 'ps(consistency=ssp(3))'; see `flockstep list strategies`.",
    names=("--strategy", "-s"),
    nouns=("strategy",),
)


_splits, _trials = partial(Opt, panel="Split models"), partial(Opt, panel="Trials")


@dataclass(frozen=True)
class TrainedJob:
    """What is trained, and how the workers coordinate."""

    job: Annotated[str | Path, JOB]
    strategy: Annotated[str | Strategy, STRATEGY]


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """Where the record is kept."""

    out: Out = None
    overwrite: bool = Opt("Replace the run that the folder of --out holds.", panel="Output").default(False)


@dataclass(frozen=True)
class TrainOptions(
    RecordOptions,
    CheckpointOptions,
    ProcessOptions,
    BadGradientOptions,
    DistributionOptions,
    SealedOptions,
    TrainingOptions,
    TrainedJob,
):
    """Options of a run on real processes."""


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(
    RecordOptions,
    BadGradientOptions,
    DistributionOptions,
    SealedOptions,
    TrainingOptions,
    VirtualTimeOptions,
    TrainedJob,
):
    """Options of a run in virtual time."""

    workers: Workers = 16
    cluster: str | Path | None = Opt(
        "Cluster that replaces --network and --compute, with links, gradient times, and the time that nodes "
        "spend on messages and steps: the name here (saved by flockstep calibrate), another name, or a TOML file.",
        panel="Virtual time",
    ).default()
    watch: Watch | None = Opt("Function that is called from time to time with the progress.", python=True).default()


@dataclass(frozen=True)
class ComparedJob:
    """What is trained, and with which strategies."""

    job: Annotated[
        str | Path,
        Arg(
            "A built-in workload (see `flockstep list workloads`), a Python file with a job() function, or a "
            "training script, which is launched with each strategy in place of the one that it names.",
            metavar="JOB|SCRIPT",
            nouns=("workload",),
        ),
    ]
    strategies: Annotated[
        Sequence[str | Strategy],
        Opt("Strategy to compare; repeat the option for several.", names=("--strategy", "-s"), nouns=("strategy",)),
    ]


@dataclass(frozen=True, kw_only=True)
class CompareOptions(
    ProcessOptions,
    DistributionOptions,
    SealedOptions,
    TrainingOptions,
    VirtualTimeOptions,
    ScriptArguments,
    ComparedJob,
):
    """Options of a comparison."""

    simulated: bool = Opt("Run in virtual time instead of on real processes.", names=("--simulate",)).default(False)
    cluster: str | Path | None = options_of(SimulateOptions)["cluster"][0].default()
    seeds: int = Opt(
        "Number of runs per strategy, with consecutive seeds from --seed on; the ranking compares medians.",
        panel="Training",
    ).default(1)
    lr_grid: Sequence[float] = Opt(
        "Learning rates, such as 0.03,0.1,0.3; each strategy is ranked at its best learning rate.",
        panel="Training",
        separated=True,
    ).default(())
    reference: bool = Opt(
        "Train one worker alone too, with as many samples: what are the other workers worth?",
        names=("--reference/--no-reference",),
    ).default(True)
    out: Out = None


@dataclass(frozen=True)
class PlannedJob:
    """What is planned, and for which machines."""

    what: Annotated[
        str | Path,
        Arg(
            "Name of a workload or model (`flockstep list workload`, `flockstep list model`), or a Python file "
            "with job()."
        ),
    ]
    cluster: str | Path | None = Opt(
        "A name from `flockstep list clusters`, or a TOML file such as the one that `flockstep calibrate` writes.",
        names=("--cluster", "-c"),
        shown="laptop, or here after flockstep calibrate; with --check the cluster of the run",
    ).default()


@dataclass(frozen=True, kw_only=True)
class PlanOptions(SealedOptions, PlannedJob):
    """Options of a plan."""

    workers: int | None = Opt(
        "Number of workers (default: all workers of the cluster).", names=("--workers", "-n")
    ).default()
    require: Sequence[str] = Opt(
        "Requirement that the strategy must meet: unbalanced, reproducible, elastic, private or slow-links; "
        "repeat the option for several."
    ).default(())
    strategies: Sequence[str] = Opt(
        "Strategy to consider; repeat the option for several (default: all strategies).",
        names=("--strategy", "-s"),
        nouns=("strategy",),
    ).default(())
    batch: int | None = Opt("Number of samples per gradient (default: the job's).", names=("--batch", "-b")).default()
    hours: float | None = Opt(
        "Length of the run in hours; it determines how many failures are expected.",
        shown="the time of the job's epochs; 24 without data",
        above=0,
        advice="leave it out for the length of the job",
    ).default()
    imports: Sequence[str] = options_of(CommonOptions)["imports"][0].default(())
    hybrid: bool = _splits(
        "Also predict models that are split over workers, and choose partition and strategy together."
    ).default(False)
    partitions: Sequence[str] = _splits(
        "Partition to consider, such as pipeline(2, 1f1b, 8); repeat the option for several (default with "
        "--hybrid: the best partitions that a search finds).",
        names=("--partition",),
    ).default(())
    memory: str | None = _splits(
        "Memory of a worker, such as 16GB; activations are included. Implies --hybrid.",
        shown="memory stated by the cluster",
    ).default()
    budget: float = _trials(
        "CPU seconds for trials, which train with the strategies in virtual time to measure how many samples "
        "each needs on this job; 0 for no trials, so that a formula assumes the number."
    ).default(120.0)
    top: int | None = _trials(
        "Number of strategies to try in addition to one worker (default: all that could be best)."
    ).default()
    seed: int = _trials("First seed of trials.").default(0)
    split: str | None = _trials("How data is split in trials (default: as --require demands).").default()
    simulate: bool = _trials(
        "Trials go on to the job's target, not only to a loss that one worker reaches early."
    ).default(False)
    target: float | None = _trials("Metric that a trial must reach, with --simulate (default: the job's).").default()
    keep: Path | None = _trials(
        "Folder in which trials are saved, with --simulate; give the same folder again to continue (default: "
        "a new folder in runs/)."
    ).default()


def takes(structure: Callable[P, S]) -> Callable[[Callable[[S], R]], Callable[P, R]]:
    """Return a decorator: the function, which has a structure of options as its only argument, is called with the
    structure's fields as arguments instead. Its docstring gets a list of them.
    """

    def decorate(function: Callable[[S], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in signature.parameters:
                    raise UnknownName.among(f"argument of flockstep.{function.__name__}", name, signature.parameters)
            options = structure(*args, **kwargs)
            require_numbers(options)
            return function(options)

        described = options_of(structure)
        signature = inspect.signature(structure)
        shown = [
            one.replace(annotation=described[one.name][1]) if one.name in described else one
            for one in signature.parameters.values()
        ]
        lines = [
            textwrap.fill(f"{name}: {option.help}", 110, initial_indent="    ", subsequent_indent="        ")
            for name, (option, _, _) in described.items()
        ]
        doc = inspect.getdoc(function) or ""
        head, sections, rest = doc.partition("\nReturns:" if "\nReturns:" in doc else "\nRaises:")
        called.__doc__ = head + "\n".join(["\nArgs:", *lines, ""]) + sections + rest
        returned = inspect.signature(function).return_annotation
        called.__signature__ = inspect.Signature(shown, return_annotation=returned)  # type: ignore[attr-defined]
        return called

    return decorate


def configured(kind: Kind, options: Any, job: str | None = None, strategy: str | None = None) -> RunConfig:
    """Return the configuration that options describe; `job` and `strategy` replace those of the options."""
    from flockstep.records.config import MetricTarget, RunConfig

    given: dict[str, Any] = {}
    for name, option in options_of_kind(kind):
        if hasattr(options, name):
            value = getattr(options, name)
            given[name] = option.usual if value is None else value
    every, steps = given.get("evaluate_every"), given.get("steps")
    if given["target"] is not None:
        if every is not None and steps is not None and every >= steps:
            raise ConfigurationError(
                f"target {given['target']} needs an evaluation before the last step, got evaluate_every {every:g} and "
                f"steps {steps}; lower evaluate_every, or leave out the target"
            )
        target = MetricTarget.parse(given["target"])
        given |= {"target": target.value, "metric": target.metric}
    for name in ("imports", "faults", "arguments"):
        if name in given:
            given[name] = listed(name, given[name])
    for name in ("checkpoint_every", "rank_output", "data", "trust", "key"):
        if given.get(name) is not None:
            given[name] = str(given[name])
    for name in ("shared", "module", "prefix"):
        if name in given:
            given[name] = given[name] or None
    job, strategy = job or str(options.job), str(options.strategy) if strategy is None else strategy
    return RunConfig(kind=kind, job=job, strategy=strategy, **given)


def listed(name: str, values: Sequence[T]) -> tuple[T, ...]:
    """Return the values of an argument that is a list. A string is refused: Python would iterate over its letters."""
    require(not isinstance(values, str), name, "a list", f"{values!r}", f"write [{values!r}]")
    return tuple(values)


def refuse_idle(kind: Kind, options: CompareOptions) -> None:
    """Refuse options of a comparison that have no effect on its kind of runs."""
    own = {name for name, _ in options_of_kind(kind)}
    simulated = {name for name, _ in options_of_kind("simulate")} | {"cluster"}
    jobs = {name for name, _ in options_of_kind("train")} | {"lr_grid"}
    idle = {
        "train": {IN_VIRTUAL_TIME: simulated - own, FOR_SCRIPTS: {"arguments"}},
        "simulate": {ON_PROCESSES: jobs - own - {"lr_grid"}, FOR_SCRIPTS: {"arguments"}},
        "launch": {IN_VIRTUAL_TIME: simulated - own, FOR_JOBS: jobs - own},
    }[kind]
    reasons = {name: why for why, names in idle.items() for name in names}
    for name, (option, _, default) in options_of(CompareOptions).items():
        value = getattr(options, name)
        if name in reasons and value not in (default.default, None, (), []):
            word = option.written(name)
            raise ConfigurationError(
                f"{word} {value[0] if isinstance(value, (tuple, list)) else value} {reasons[name]}"
            )


def rates(grid: Sequence[float], lr: float | None) -> tuple[float, ...]:
    """Return the learning rates of a grid, which must be different numbers above 0; `lr` in addition is refused."""
    text = ",".join(f"{rate:g}" for rate in listed("lr_grid", grid))
    if grid and lr is not None:
        raise ConfigurationError(f"lr {lr:g} and lr_grid {text} contradict each other; give one of them")
    if not all(0 < rate < math.inf for rate in grid) or len(set(grid)) < len(grid):
        raise ConfigurationError(f"lr_grid must be different numbers > 0, got {text}; write 0.03,0.1,0.3")
    return tuple(grid)
