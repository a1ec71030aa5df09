"""Trains a declared job on real processes of this machine."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

from flockstep.arrays.memory import release
from flockstep.errors import ConfigurationError
from flockstep.frameworks.job import without_whole
from flockstep.launchers.checkpoints import require_checkpoints, require_one_machine, require_resumable
from flockstep.launchers.children import KERNELS, Child, fork, refuse_program
from flockstep.launchers.entry import worker_main
from flockstep.launchers.gathering import HEARTBEAT, Gathering, settings_of
from flockstep.launchers.host_messages import Accepted
from flockstep.launchers.hosts import OtherHosts
from flockstep.launchers.initial_parts import InitialParts
from flockstep.launchers.open_files import require_cores, require_open_files
from flockstep.launchers.resizing import config_of, moved, require_limits, resized_run
from flockstep.launchers.segment import NodesChanged, RunSegment, Show, continue_record, evaluated_in
from flockstep.launchers.wait_monitor import on_stderr
from flockstep.records import owner
from flockstep.records.checkpoints import newest
from flockstep.records.config import RunConfig
from flockstep.records.folder import RunFolder
from flockstep.records.summary import Summary
from flockstep.runtime.member import NodeSpec
from flockstep.runtime.resizing import require_resizable
from flockstep.runtime.setup import JOB_FILE, BuiltJob, prepare, require_unchanged
from flockstep.strategies.base import Strategy
from flockstep.workloads.own_data import OwnData


def train(
    config: RunConfig,
    folder: Path,
    show: Show = lambda standings, steps: None,
    overwrite: bool = False,
    gathering: Gathering | None = None,
    test: OwnData | None = None,
) -> Summary:
    """Train a declared job on `config.workers` processes, and write the record.

    A script must guard the call, because the processes that it starts import the script again:

        if __name__ == "__main__":
            train(RunConfig(kind="train", job="softmax", strategy="all_reduce", workers=2), Path("runs/mine"))

    Args:
        config: the run's configuration, with `kind="train"`.
        folder: folder of the record; created if it is missing.
        show: called from time to time with the state of every node, by address, and with the steps of each worker.
        overwrite: replace the run that the folder holds.
        gathering: the hosts of the run, of which this one coordinates; None: all processes are on this machine.
        test: the test set, if each worker of the `gathering` has its own samples; None for the job's test set.

    Returns:
        The summary of the record.

    Raises:
        ConfigurationError: the configuration is invalid; nothing was started.
        RunError: the run failed; the record is complete up to the failure, and its summary names the reason.
    """
    refuse_program()
    if test is not None:
        _require_unchanging(config)
    settings = settings_of(config)
    if gathering is not None:
        config = gathering.over(config)
        require_one_machine(config)
    else:
        require_cores(config.workers, config.heartbeat or HEARTBEAT)
    jobs = _Jobs(test)
    built = jobs.built(config)
    plan, config = prepare(config, test, built)[1:]
    require_open_files(len(plan.cluster.processes) * (1 if plan.split is None else plan.split.partition.parts))
    if config.checkpoint_every is not None:
        require_checkpoints(plan.strategy)
    require_changes(config, plan.strategy)
    record = RunFolder(folder)
    facts = plan.steps, plan.evaluate_every, plan.result
    parts, said = _initial_parts(built, config)
    del plan, built
    release()

    with contextlib.ExitStack() as stack:
        hosts = OtherHosts() if gathering is None else gathering.hosts(config, settings, stack)
        stack.enter_context(record.created(config, overwrite))
        segment = RunSegment(config, record, *facts, show, hosts, test, said=said, parts=parts)
        _with_changes(record, show, jobs, segment.run, hosts)
    return record.read_summary()


def _initial_parts(built: BuiltJob, config: RunConfig) -> tuple[InitialParts | None, list[str]]:
    """The parts of a model that is split, otherwise None, and sentences for the record."""
    if built.split is None:
        return None, []
    parts = InitialParts.of(without_whole(built.job, config.seed, built.split))
    said = []
    if parts.facts.obstacle:
        said.append(
            f"every process built the whole model before it kept its part, because the parts cannot be built alone: "
            f"{parts.facts.obstacle}"
        )
        on_stderr(said[0])
    return parts, said


def _require_unchanging(config: RunConfig) -> None:
    """Raise `ConfigurationError` if a run whose workers have samples of their own is to take checkpoints, or to change
    its workers.
    """
    for name in ("checkpoint_every", "min_workers", "max_workers"):
        if (value := getattr(config, name)) is not None:
            raise ConfigurationError(
                f"a run whose workers have samples of their own takes no checkpoints and keeps its workers, got "
                f"{name}={value}; leave it out"
            )


class _Jobs:
    """Builds the job of a run, and keeps the job where workers may leave or join, because they wait for a change."""

    def __init__(self, own: OwnData | None = None):
        self._own = own
        self._kept: BuiltJob | None = None

    @property
    def keeps(self) -> bool:
        """Whether the job has been built and kept."""
        return self._kept is not None

    def built(self, config: RunConfig) -> BuiltJob:
        """The job of a run; the process that evaluates builds its own."""
        built = self._kept or BuiltJob.of(config, self._own)
        self._kept = None if config.min_workers is None and config.max_workers is None else built
        return built


def require_changes(config: RunConfig, strategy: Strategy) -> None:
    """Check that workers may leave the run, down to `config.min_workers`, and join, up to `config.max_workers`.

    Raises:
        ConfigurationError: the number of workers is not within these limits, or checkpoints are off.
        CompositionError: the strategy has no checkpoints, or no rule for another number of workers.
    """
    if config.min_workers is None and config.max_workers is None:
        return
    require_limits(config)
    require_checkpoints(strategy)
    require_resizable(strategy, "leave out --min-workers and --max-workers")


def _with_changes(record: RunFolder, show: Show, jobs: _Jobs, begin: Callable[[], None], hosts: OtherHosts) -> None:
    """Begin a run with `begin`, and continue it whenever workers leave or join, or servers are lost."""
    try:
        begin()
        return
    except NodesChanged as first:
        change: NodesChanged | None = first
    while change is not None:
        now, change = change, None
        try:
            segment = _continued(record, show, jobs, now.workers, now)
            dataclasses.replace(segment, hosts=hosts).run()
        except NodesChanged as again:
            change = again
        finally:
            now.supervisor.close()
            if change is None:
                now.supervisor.members.newcomers.end()


def resume(
    folder: Path,
    show: Show = lambda standings, steps: None,
    workers: int | None = None,
    gathering: Gathering | None = None,
) -> Summary:
    """Continue the run in a folder from its newest complete checkpoint, with the same configuration.

    Events that were recorded after the checkpoint are dropped.

    Args:
        folder: folder of the record.
        show: see `train`.
        workers: number of workers with which the run continues; None for the number that it had.
        gathering: the hosts of the run from now on, of which this one coordinates; None: all processes are on this
            machine.

    Raises:
        ConfigurationError: the folder holds no run that can continue; nothing was started.
        CompositionError: the strategy has no rule for another number of workers; nothing was started.
        RunError: the run failed; the record is complete up to the failure.
    """
    refuse_program()
    record = RunFolder(folder)
    config = record.read_config()
    if config.kind == "launch":
        raise ConfigurationError(f"{folder} holds a run of flockstep launch; resume it with flockstep resume {folder}")
    if config.kind != "train":
        raise ConfigurationError(
            f"{folder} holds a run of flockstep {config.kind}, which cannot be resumed; repeat the run: "
            f"{config.command}"
        )
    if config.partition is not None and workers not in (None, config.workers):
        raise ConfigurationError(
            f"a run of a split model continues with as many workers as before, got {workers} instead of "
            f"{config.workers}; leave -n out"
        )
    if not record.unfinished:
        raise ConfigurationError(f"{folder} holds a run that has ended; start another run in another folder")
    with owner.owned(record.path), contextlib.ExitStack() as stack:
        jobs, hosts = _Jobs(), OtherHosts()
        segment = _continued(record, show, jobs, workers)
        if gathering is not None:
            require_one_machine(config)
            again = moved(record, segment.config, gathering)
            hosts = gathering.hosts(again, settings_of(config), stack, resumes=True)
            segment = dataclasses.replace(segment, config=again, hosts=hosts)
        _with_changes(record, show, jobs, segment.run, hosts)
    return record.read_summary()


def _continued(
    record: RunFolder,
    show: Show,
    jobs: _Jobs,
    workers: int | None,
    left: NodesChanged | None = None,
) -> RunSegment:
    """Prepare the continuation of a run, whose folder this process owns, from its newest checkpoint.

    Args:
        record: the run's folder.
        show: see `train`.
        jobs: builds the run's job.
        workers: number of workers from now on; None: as many as the checkpoint holds.
        left: how the nodes have changed, and the processes that continue; None: all processes are started.
    """
    config, checkpoint = record.read_config(), newest(record.path)
    config = config_of(record, checkpoint, config)
    kept = jobs.keeps
    built = jobs.built(config)
    plan, again = prepare(config, None, built)[1:]
    require_resumable(checkpoint, plan.strategy, config.workers, config.digest)
    if not kept:  # otherwise the job was built when the run began
        require_unchanged(config, again.versions.get(JOB_FILE))
    change, workers = None, workers or len(checkpoint.manifest.steps)
    if workers != config.workers or checkpoint.manifest.lost:
        gone = () if left is None else left.gone
        change = resized_run(checkpoint, built, plan, config, workers, gone, evaluated_in(record))
        plan, config = change.plan, change.config
        require_open_files(len(plan.cluster.processes))
    facts = plan.steps, plan.evaluate_every, plan.result
    parts = _initial_parts(built, config)[0]
    del plan, built
    if not jobs.keeps:
        release()
    checkpoint = continue_record(record, config, checkpoint, change, left)
    return RunSegment(config, record, *facts, show, OtherHosts(), None, checkpoint, (), left, parts)


def train_for(gathering: Gathering, config: RunConfig) -> None:
    """Start and watch this host's workers of a run that another host coordinates.

    Raises:
        ConfigurationError: the coordinator refused, or cannot be reached.
        RunError: the run failed.
    """
    refuse_program()

    def start_worker(node_spec: NodeSpec, accepted: Accepted) -> Child:
        ours = RunConfig.from_toml(accepted.config, "the coordinator's configuration").with_files_of(config)
        return fork(worker_main, (node_spec, config.threads or 1, ours.to_toml()), [KERNELS])

    gathering.serve(config, settings_of(config), start_worker)
