"""Trains a declared job on real processes of this machine, or of several."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from flockstep.arrays.memory import release
from flockstep.errors import ConfigurationError
from flockstep.launchers.checkpoints import require_checkpoints, require_one_machine
from flockstep.launchers.children import KERNELS, Child, fork, refuse_program
from flockstep.launchers.continuing import (
    ResizedRun,
    require_interval,
    require_limits,
    resized_run,
    with_workers,
)
from flockstep.launchers.entry import worker_main
from flockstep.launchers.evaluation import Evaluator, SnapshotHandler
from flockstep.launchers.executable import Executable, InitialParts, Show
from flockstep.launchers.gathering import HEARTBEAT, Gathering, settings_of
from flockstep.launchers.host_messages import Accepted
from flockstep.launchers.hosts import OtherHosts
from flockstep.launchers.newcomers import Newcomers, of_job
from flockstep.launchers.open_files import require_cores, require_open_files
from flockstep.launchers.run import SupervisedRun, evaluated_in, resume_run
from flockstep.launchers.wait_monitor import JOINS_JOB, on_stderr
from flockstep.links.kinds import Transport
from flockstep.partitions.base import JointPartition
from flockstep.records.checkpoints import Checkpoint
from flockstep.records.config import JOB_FILE, RunConfig
from flockstep.records.folder import RunFolder
from flockstep.records.summary import Summary
from flockstep.runtime.member import NodeSpec
from flockstep.runtime.plan import Plan
from flockstep.runtime.process import repeats_steps
from flockstep.runtime.resizing import require_resizable
from flockstep.runtime.setup import BuiltJob, prepare, require_unchanged
from flockstep.runtime.tape import require_replayable
from flockstep.split.splitting import without_whole
from flockstep.strategies.base import Strategy
from flockstep.workloads.own_data import OwnData


def train(
    config: RunConfig,
    folder: Path,
    show: Show = lambda nodes, steps: None,
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
    for name in ("checkpoint_every", "min_workers", "max_workers") if test is not None else ():
        if (value := getattr(config, name)) is not None:
            raise ConfigurationError(
                f"a run whose workers have samples of their own takes no checkpoints and keeps its workers, got "
                f"{name}={value}; leave it out"
            )
    settings = settings_of(config)
    if gathering is not None:
        config = gathering.over(config)
        require_one_machine(config)
    else:
        require_cores(config.workers, config.heartbeat or HEARTBEAT)
    job = JobExecutable(test)
    config = job.prepare(config)
    if config.replayable:
        require_replayable(job.plan.strategy)
        if job.parts is not None:
            raise ConfigurationError(
                f"a run of a split model cannot be replayed yet, got partition={config.partition}; leave out "
                "--replayable, or the partition"
            )
    if config.checkpoint_every is not None:
        require_checkpoints(job.plan.strategy)
    if config.min_workers is not None or config.max_workers is not None:
        require_limits(config)
        if gathering is not None or not repeats_steps(job.plan):
            require_interval(config)
        require_checkpoints(job.plan.strategy)
        require_resizable(job.plan.strategy, "leave out --min-workers and --max-workers")
    record = RunFolder(folder)
    with ExitStack() as stack:
        hosts = OtherHosts() if gathering is None else gathering.hosts(config, settings, stack)
        stack.enter_context(record.created(config, overwrite))
        SupervisedRun(record, job, show, hosts).run(config)
    return record.read_summary()


def resume(
    folder: Path,
    show: Show = lambda nodes, steps: None,
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
    if gathering is not None:
        require_one_machine(config)
    return resume_run(record, JobExecutable(), show, workers, gathering, settings_of(config))


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


class JobExecutable(Executable):
    """A declared job, which every worker builds from the run's configuration."""

    joins = JOINS_JOB
    plan: Plan
    """The plan of the run, until the run begins."""
    _config: RunConfig
    _built: BuiltJob | None = None
    """The job, from its first use on where workers may leave or join, because the others wait for a change."""

    def __init__(self, test: OwnData | None = None):
        """`test`: the test set, if each worker has its own samples; None for the job's test set."""
        super().__init__()
        self._test = test

    def prepare(self, config: RunConfig) -> RunConfig:
        """Build the job and its plan; return the configuration with all defaults filled in.

        Raises:
            ConfigurationError: the configuration is invalid, or this process may not open enough files.
        """
        built = self._built = self._built or BuiltJob.of(config, self._test)
        plan, config = prepare(config, self._test, built)[1:]
        self._follow(plan)
        require_open_files(len(plan.cluster.processes) * (1 if built.split is None else built.split.partition.parts))
        if built.split is not None:
            self.parts = InitialParts.of(without_whole(built.job, config.seed, built.split))
            self.checkpoints = not self.parts.delayed  # else micro-batches are in flight at every time
            if self.parts.facts.obstacle:
                text = (
                    "every process built the whole model before it kept its part, because the parts cannot be built "
                    f"alone: {self.parts.facts.obstacle}"
                )
                self.notes = [text]
                on_stderr(text)
        return config

    def prepare_again(self, config: RunConfig, begins: bool) -> Strategy:
        first = self._built is None  # otherwise the job was built when the run began
        found = self.prepare(config).versions.get(JOB_FILE)
        if first:
            require_unchanged(config, found)
        return self.plan.strategy

    def resized(
        self, checkpoint: Checkpoint, config: RunConfig, asked: RunConfig, gone: Collection[int], record: RunFolder
    ) -> ResizedRun:
        assert self._built is not None
        change = resized_run(checkpoint, self._built, self.plan, config, asked.workers, gone, evaluated_in(record))
        self._follow(change.plan)
        return change

    def without_stop(self, config: RunConfig, workers: int) -> RunConfig:
        assert self._built is not None
        plan, config = with_workers(self._built, config, workers)
        self._follow(plan)
        return config

    def go_on(self, config: RunConfig, remaining: Mapping[int, int]) -> None:
        self._config = config

    def _follow(self, plan: Plan) -> None:
        self.plan, self.steps, self.every, self.policy = plan, plan.steps, plan.evaluate_every, plan.result

    def begin(self, config: RunConfig) -> None:
        """From now on this process only supervises: return the memory of the job and its plan, unless workers wait for
        this process to continue.
        """
        self._config = config
        del self.plan
        if config.min_workers is None and config.max_workers is None:
            self._built = None
            release()

    def start(self, node_spec: NodeSpec) -> Child:
        config = self._config
        preload = [KERNELS] if self._transport.zero_copy else []
        if self.parts is not None and isinstance(self.parts.partition, JointPartition):
            preload.append("flockstep.split.torch_joint")  # a second in each process otherwise
        return fork(worker_main, (node_spec, config.threads or 1, config.to_toml()), preload)

    @property
    def _transport(self) -> Transport:
        return Transport.parse(self._config.transport or "shared_memory")

    def evaluation(self, record: Path) -> SnapshotHandler:
        facts = None if self.parts is None else self.parts.facts
        return Evaluator(record, self._config.threads or 1, self._test, facts)

    def newcomers(self) -> Newcomers:
        return Newcomers(partial(of_job, self._config, self._transport.zero_copy))
