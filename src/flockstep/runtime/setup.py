"""Builds the job, the engine and the plan of a run from the run's configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from flockstep import registry
from flockstep.errors import CompositionError, ConfigurationError
from flockstep.frameworks.base import Engine, Job
from flockstep.frameworks.job import JOB_FILES, import_components, load_job_file, make_engine
from flockstep.links.kinds import Transport
from flockstep.options import SEALED, SealedOptions
from flockstep.partitions.base import Partition, Unsplit
from flockstep.partitions.split_facts import SplitFacts
from flockstep.records.config import DATA, JOB_FILE, SPLIT, RunConfig
from flockstep.runtime.plan import Plan, require_splittable, whole_cluster
from flockstep.schedules.base import Schedule
from flockstep.schedules.timetable import Timetable
from flockstep.sealed.contract import notices
from flockstep.sealed.job import load_sealed
from flockstep.simulation import USUAL_COMPUTE, USUAL_NETWORK
from flockstep.simulation.compute import ComputeModel
from flockstep.simulation.faults import Fault
from flockstep.simulation.network import Network
from flockstep.split.splitting import make_split
from flockstep.split.stages import SplitModel
from flockstep.strategies.base import Strategy, choose_result
from flockstep.strategies.finite import require_skippable
from flockstep.systems import catalog
from flockstep.workloads.base import Workload
from flockstep.workloads.own_data import OwnData
from flockstep.workloads.sampler import steps_for
from flockstep.workloads.split import Split

EVALUATIONS = 40
"""Default number of evaluations of the model during a run."""


UNSEALED = SealedOptions()
"""The options of a job that is not sealed."""


def load_job(text: str, seed: int, given: SealedOptions = UNSEALED) -> Job:
    """Return the job that `text` names: the expression of a workload, the path of a Python file with a `job()`
    function, or of a file that `flockstep seal` wrote, which has the data and the keys that the options name.
    """
    if text.endswith(SEALED):
        return load_sealed(text, given)
    if words := given.words():
        raise ConfigurationError(
            f"{words[0]} is for a job that flockstep seal wrote, got {text}; leave the option out, or seal the job"
        )
    if text.endswith(".py"):
        return load_job_file(Path(text))
    if text not in (*registry.names("workload"), *registry.aliases("workload")) and Path(text).exists():
        raise ConfigurationError(
            f"a job must be the name of a workload or a Python file, and {text} is a "
            f"{'folder' if Path(text).is_dir() else 'file of another kind'}; give the path of a .py file, or see "
            "recorded runs with flockstep report"
        )
    return Workload.parse(text).job(seed)


def check(config: RunConfig) -> Strategy:
    """Return the strategy of `config`, after all checks of the configuration that need no data.

    Raises:
        ConfigurationError: a value is invalid.
    """
    import_components(config.imports)
    strategy = Strategy.parse(config.strategy)
    partition = partition_of(config)
    replicas = partition.replicas(config.workers)
    strategy.check(replicas)
    canonical(config)
    choose_result(strategy, config.result)  # type: ignore[arg-type]
    if partition != Unsplit() and config.kind == "train":
        _require_plain_run(config, partition)
    for fault in map(Fault.parse, config.faults):
        if partition != Unsplit() and not fault.split:
            known = [name for name in registry.names("fault") if registry.load("fault", name).split]
            raise CompositionError(
                f"{fault} cannot be injected into a run of a split model; use one of {', '.join(known)}, or "
                "partition=none"
            )
        fault.check(whole_cluster(strategy.cluster(replicas), partition.parts))
        if config.kind == "train" and not fault.real:
            raise ConfigurationError(
                f"{fault} happens in virtual time only; use flockstep simulate, or one of {', '.join(_real_faults())}"
            )
    require_skippable(strategy, config.bad_gradients, replicas)
    for name in ("steps", "epochs", "batch", "lr", "evaluate_every"):
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ConfigurationError(f"{name} must be > 0, got {value}; leave it out for the job's own {name}")
    return strategy


def partition_of(config: RunConfig) -> Partition:
    """Return the partition that `config` requests.

    Raises:
        ConfigurationError: a script's model would have to be split.
    """
    partition: Partition = Unsplit() if config.partition is None else Partition.parse(config.partition)
    if config.kind == "launch" and partition != Unsplit():
        raise ConfigurationError(
            f"the model of a script cannot be split, got {partition} for flockstep launch; use flockstep train with a "
            "job, or leave the partition out"
        )
    return partition


def _require_plain_run(config: RunConfig, partition: Partition) -> None:
    """Raise `CompositionError` if real processes of a split model would have faults injected, take checkpoints with
    micro-batches in flight, or leave and join.
    """
    forbidden = {
        "faults": "faults cannot be injected into",
        "min_workers": "workers cannot leave",
        "max_workers": "workers cannot join",
    }
    for name, what in forbidden.items():
        if value := getattr(config, name):
            got = value[0] if isinstance(value, tuple) else f"{name}={value}"
            raise CompositionError(
                f"{what} a run of a split model on real processes yet, got {got} with partition={config.partition}; "
                f"leave out {name}, or use partition=none"
            )
    if config.checkpoint_every is not None and partition.remembers:
        raise CompositionError(
            "checkpoints of a split model do not contain the activations that differences are taken from, got "
            f"checkpoint_every={config.checkpoint_every} with {config.partition}; leave out differences, or "
            "checkpoint_every"
        )
    if config.checkpoint_every is not None and partition.delays is not None:
        raise CompositionError(
            "checkpoints need a schedule in which no micro-batch is in flight at the end of a step, got "
            f"checkpoint_every={config.checkpoint_every} with {config.partition}; use a schedule such as 1f1b, or "
            "leave out checkpoint_every"
        )


def _real_faults() -> list[str]:
    return [name for name in registry.names("fault") if registry.load("fault", name).real]


def canonical(config: RunConfig) -> RunConfig:
    """Return the configuration with every component in its shortest form, and with the default models of a simulation
    filled in.
    """
    if config.kind == "simulate":
        usual = {"compute": USUAL_COMPUTE, "network": USUAL_NETWORK}
        left_out: dict[str, Any] = {name: text for name, text in usual.items() if getattr(config, name) is None}
        config = dataclasses.replace(config, **left_out)
    bases = {
        "strategy": Strategy,
        "schedule": Schedule,
        "split": Split,
        "network": Network,
        "compute": ComputeModel,
        "transport": Transport,
    }
    texts: dict[str, Any] = {
        name: str(base.parse(getattr(config, name)))
        for name, base in bases.items()
        if getattr(config, name) is not None
    }
    if config.network is not None:
        texts["network"] = str(Network.parse(texts["network"]).resolved(config.workers))
    partition = partition_of(config)
    texts["partition"] = None if partition == Unsplit() else str(partition)
    texts["system"] = config.system or _system(config.strategy)
    texts["faults"] = tuple(str(Fault.parse(fault)) for fault in config.faults)
    return dataclasses.replace(config, **texts)


def _system(strategy: str) -> str | None:
    """The name by which the strategy was given, if that is an alias, or a system with its mode."""
    name, _, mode = strategy.partition(":")
    if strategy in registry.aliases("strategy"):
        return strategy
    if strategy in registry.names("strategy") or catalog.expression(name) is None:
        return None
    return catalog.system(name).name + (f": {mode.strip()}" if mode else "")


def versions() -> dict[str, str]:
    """Return package → version, for the installed packages on which a run depends."""
    found = {"python": platform.python_version()}
    for package in ("flockstep", "numpy", "torch", "scikit-learn"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def digest(file: Path) -> str:
    """Return 16 hexadecimal digits of the file's SHA-256; they are equal for two files only if the contents are
    equal.
    """
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def require_unchanged(config: RunConfig, found: str | None) -> None:
    """Raise `ConfigurationError` if the file of a run's job has changed since the run began; `found` is the file's
    digest now.
    """
    if (was := config.versions.get(JOB_FILE)) != found:
        raise ConfigurationError(
            f"{config.job} has changed since the run began (its hash was {was}); restore this file"
        )


def overridden(job: Job, config: RunConfig) -> Job:
    """Return the job with the values that the configuration overrides."""
    changes = {
        name: getattr(config, name) for name in ("batch", "epochs", "target") if getattr(config, name) is not None
    }
    return dataclasses.replace(job, **changes)


@dataclass(frozen=True, eq=False)
class BuiltJob:
    """A job that has been loaded, with the samples that this process uses, and its engine."""

    job: Job
    engine: Engine
    split: SplitModel | None = None
    """The model cut into parts, if the configuration has a partition; `engine` is then the engine of the parts."""

    @classmethod
    def of(cls, config: RunConfig, own: OwnData | None = None, facts: SplitFacts | None = None) -> BuiltJob:
        """Load the job of a configuration and build its engine.

        Args:
            config: the run's configuration.
            own: the samples of this process, in place of the job's samples.
            facts: where the model is cut, if this process holds one part of a model that another process has cut.

        Raises:
            ConfigurationError: the configuration is invalid.
            CompositionError: workers of the strategy compute on each other's samples, and each has its `own`.
        """
        strategy = check(config)
        loaded = load_job(config.job, config.seed, config)
        job = overridden(loaded, config)
        if own is not None:
            require_own_samples(strategy)
            job = own.job(job)
        partition = partition_of(config)
        if own is not None and partition != Unsplit():
            raise CompositionError(
                f"all stages of a replica need the same samples, but in this run each worker has its own samples, got "
                f"{partition}; leave the partition out"
            )
        split = None if partition == Unsplit() else make_split(job, config.seed, partition, facts)
        engine = make_engine(job, config.seed) if split is None else split.engine
        if own is not None:
            engine.train_size = sum(own.sizes)
        if job.batch != loaded.batch and job.batch > (size := engine.train_size):
            raise ConfigurationError(
                f"batch must be <= {size}, the number of training samples, got {job.batch}, with which every batch "
                f"would contain samples several times; use --batch {size} or less"
            )
        return cls(job, engine, split)


def prepare(
    config: RunConfig, own: OwnData | None = None, built: BuiltJob | None = None
) -> tuple[Engine, Plan, RunConfig]:
    """Build the engine and the plan of one process; also return the configuration with all defaults filled in.

    Args:
        config: the run's configuration.
        own: the samples of this process, in place of the job's samples.
        built: the job, already loaded for the same run with another number of workers; None to load the job.

    Raises:
        ConfigurationError: the configuration is invalid, or facts of the job differ from the recorded ones.
        CompositionError: workers of the strategy compute on each other's samples, and each has its `own`.
    """
    strategy = check(config)
    config = canonical(config)
    built = built or BuiltJob.of(config, own)
    job, engine = built.job, built.engine
    config = _scheduled(config, job)
    replicas = partition_of(config).replicas(config.workers)
    facts = {**job.facts, **engine.facts}
    for fact, value in config.facts.items():
        if facts.get(fact) != value:
            raise ConfigurationError(
                f"the data has changed: {fact} is {facts.get(fact)}, but the record says {value}; train with "
                "the data of the record, and read the data in the same order in every process and every time"
            )
    if config.until_target and job.target is None:
        raise ConfigurationError(f"until_target needs a target, and {job.name} has none; give one with --target")
    metric = job.metric if isinstance(job.metric, str) else getattr(job.metric, "__name__", "metric")
    if config.metric not in (None, metric) and config.target is not None:
        raise ConfigurationError(
            f"the target must be a value of {metric}, the metric of {job.name}, got {config.metric}={config.target:g}; "
            f"write {metric}=… or the number alone"
        )
    optimizer = engine.optimizer
    if config.lr is not None:
        optimizer = optimizer.with_lr(config.lr)
    least = 1 if config.epochs else job.least_steps
    steps = config.steps or max(least, steps_for(job.epochs, engine.train_size, replicas, job.batch))
    timetable = _timetable(config, job, optimizer.lr, engine.train_size, steps, replicas)
    if timetable is not None:
        steps = config.steps or timetable.steps
    every = int(config.evaluate_every or max(1, steps // EVALUATIONS))
    split = Split.parse(config.split)
    size, labels = engine.train_size, engine.labels
    parts = split.assign(labels, size, replicas, config.seed) if own is None else own.parts
    result = choose_result(strategy, config.result)  # type: ignore[arg-type]
    cluster = strategy.cluster(replicas)
    plan = Plan(strategy, cluster, optimizer, parts, job.batch, steps, config.seed, result, every, timetable)
    plan = dataclasses.replace(
        plan,
        bad_gradients=config.bad_gradients,
        faults=tuple(map(Fault.parse, config.faults)),
        split=built.split,
    )
    _require_no_buffers(strategy, engine)
    if built.split is not None:
        require_splittable(plan)
        for samples in {plan.batch_at(step) for step in range(plan.steps)}:
            built.split.require_batch(samples)
    found = _versions(config, built)
    if config.data is not None and (said := notices(config.data, size, replicas * job.batch)):
        found[DATA] = "; ".join(said)
    resolved = dataclasses.replace(
        config,
        result=result,
        steps=steps,
        epochs=float(job.epochs if timetable is None else timetable.epochs),
        batch=job.batch,
        lr=None if math.isnan(optimizer.lr) else optimizer.lr,
        evaluate_every=float(every),
        metric=metric,
        higher_is_better=job.higher_is_better,
        target=job.target,
        facts=facts,
        versions=found,
    )
    return engine, plan, resolved


def _versions(config: RunConfig, built: BuiltJob) -> dict[str, str]:
    """Return the versions that a record names: of libraries, and digests of the job's file and of the split model."""
    found = versions()
    if config.job.endswith(JOB_FILES):
        found[JOB_FILE] = digest(Path(config.job))
    if built.split is not None and built.split.note is not None:
        found[SPLIT] = built.split.note
    return found


def _require_no_buffers(strategy: Strategy, engine: Engine) -> None:
    """Raise `CompositionError` if the model has buffers, and not every worker takes part in every round."""
    if strategy.traits.served and len(engine.buffers(0)):
        raise CompositionError(
            "the model keeps buffers, such as the running averages of BatchNorm, and only some workers take part in a "
            f"round of {strategy}, so that no buffers belong to the server's model; use GroupNorm, or local_sgd"
        )


def _scheduled(config: RunConfig, job: Job) -> RunConfig:
    """Return the configuration with the job's schedule, unless it names a schedule."""
    if config.schedule is not None or job.schedule is None:
        return config
    return dataclasses.replace(config, schedule=str(Schedule.parse(job.schedule)))


def require_own_samples(strategy: Strategy) -> None:
    """Raise `CompositionError` if workers of the strategy compute gradients on samples of other workers."""
    if strategy.traits.samples == "others":
        raise CompositionError(
            f"workers of {strategy} compute gradients on samples of other workers, but these samples may not leave "
            "their machines; use a strategy whose workers need only their own samples, such as all_reduce"
        )


def _timetable(config: RunConfig, job: Job, lr: float, train_size: int, steps: int, workers: int) -> Timetable | None:
    """The schedule over as many samples as `steps` steps of the job's batch use, or over config.epochs.

    Steps and epochs of a resolved configuration determine where the run stops, and how long the schedule is.
    """
    if config.schedule is None:
        return None
    schedule = Schedule.parse(config.schedule)
    if math.isnan(lr):
        raise ConfigurationError(
            f"the schedule {schedule} must change the learning rate, but only optax knows the learning rate of this "
            f"optimizer; use for example optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), or a schedule of optax"
        )
    facts = lr, job.batch, workers, train_size
    if config.steps and config.epochs is None:
        return Timetable.over_steps(schedule, *facts, config.steps)
    return Timetable(schedule, *facts, config.epochs or steps * workers * job.batch / train_size)
