"""Real training of a declared job on processes of this machine."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from flockstep.arrays.memory import release
from flockstep.arrays.schema import FlatArray
from flockstep.drivers.member import NodeSpec
from flockstep.drivers.node_metrics import Emit
from flockstep.drivers.resizing import require_resizable
from flockstep.drivers.setup import JOB_FILE, prepare
from flockstep.drivers.snapshot_tracker import SnapshotTick
from flockstep.errors import ConfigurationError, Diverged, FlockstepError, Interrupted
from flockstep.launchers.checkpoints import (
    Checkpointer,
    require_checkpoints,
    require_one_machine,
    require_resumable,
)
from flockstep.launchers.children import Child, fork, refuse_program
from flockstep.launchers.entry import start_server, worker_main
from flockstep.launchers.evaluation import Evaluator
from flockstep.launchers.gathering import HEARTBEAT, Gathering, link_timeout_of, settings_of
from flockstep.launchers.host_messages import Accepted
from flockstep.launchers.hosts import OtherHosts
from flockstep.launchers.join_requests import JoinRequests
from flockstep.launchers.node_progress import NodeProgress
from flockstep.launchers.open_files import require_open_files
from flockstep.launchers.resizing import config_of, resized_run
from flockstep.launchers.signals import undisturbed
from flockstep.launchers.supervisor import Change, Outcome, Supervisor
from flockstep.launchers.wait_monitor import on_stderr
from flockstep.messages import Address
from flockstep.records import owner
from flockstep.records.checkpoints import Checkpoint, newest
from flockstep.records.config import KEEP, RunConfig
from flockstep.records.events import EvaluationEvent, Event, ResultEvent
from flockstep.records.folder import EventWriter, RunFolder
from flockstep.records.snapshots import SNAPSHOTS
from flockstep.records.summary import Status, Summary, reaches, summarize
from flockstep.strategies.base import ResultPolicy, Strategy
from flockstep.transports.base import Transport
from flockstep.workloads.own_data import OwnData

Show = Callable[[dict[Address, NodeProgress], int], None]


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
        test: the test set, if each worker of the `gathering` has samples of its own; None: the job's data are used.

    Returns:
        The summary of the record.

    Raises:
        ConfigurationError: the configuration is invalid; nothing was started.
        RunError: the run failed; the record is complete up to the failure, and its summary names the reason.
    """
    refuse_program()
    settings = settings_of(config)
    if gathering is not None:
        config = gathering.over(config)
        require_one_machine(config)
    engine, plan, config = prepare(config, test)
    require_open_files(plan.cluster.workers + plan.cluster.servers)
    if config.checkpoint_every is not None:
        require_checkpoints(plan.strategy)
    require_changes(config, plan.strategy)
    record = RunFolder(folder)
    every, policy, steps = plan.evaluate_every, plan.result, plan.steps
    del engine, plan  # each holds a model; the evaluating process builds its own
    release()

    with contextlib.ExitStack() as stack:
        hosts = OtherHosts() if gathering is None else gathering.hosts(config, settings, stack)
        stack.enter_context(record.created(config, overwrite))
        shown = partial(_shown, show, steps)
        _with_changes(record, show, lambda: _train(config, record, every, policy, shown, hosts, test))
    return record.read_summary()


_RESTARTED = "the workers, and new servers,"


class NodesChanged(Interrupted):
    """Workers leave or join a run, or nodes are lost, and the processes of the other workers wait to continue."""

    def __init__(self, change: Change, supervisor: Supervisor, workers: int, epoch: int):
        """`workers`: number of workers so far; `epoch`: number of changes of the workers so far."""
        super().__init__(change.reason)
        self.supervisor, self.gone, self.epoch, self.since = supervisor, change.gone, epoch, change.since
        self.others = "the other workers" if change.gone else "the run" if change.joined else _RESTARTED
        """Who continues, for a sentence."""
        staying = [rank for rank in range(workers) if rank not in change.gone]
        self.workers = len(staying) + change.joined
        """Number of workers from now on."""
        same = self.workers == workers  # then ranks are kept, and workers that join take the places of others
        self.remaining = {rank if same else new: rank for new, rank in enumerate(staying)}
        """New rank → old rank of the workers whose processes continue."""


def require_changes(config: RunConfig, strategy: Strategy) -> None:
    """Check that workers may leave the run, down to `config.min_workers`, and join it, up to `config.max_workers`.

    Raises:
        ConfigurationError: there are fewer or more workers, or no checkpoints.
        CompositionError: the strategy has no checkpoints, or no rule for another number of workers.
    """
    least, most = config.min_workers, config.max_workers
    if least is None and most is None:
        return
    if least is not None and least > config.workers:
        raise ConfigurationError(
            f"min_workers must be <= {config.workers}, the number of workers, got {least}; lower it"
        )
    if most is not None and most < config.workers:
        raise ConfigurationError(
            f"max_workers must be >= {config.workers}, the number of workers, got {most}; raise it"
        )
    if least is not None and config.checkpoint_every is None:
        raise ConfigurationError(
            "min_workers needs checkpoints, from which the run continues when a worker is lost; add for example "
            "--checkpoint-every 100"
        )
    require_checkpoints(strategy)
    require_resizable(strategy, "leave out --min-workers and --max-workers")


def _with_changes(record: RunFolder, show: Show, begin: Callable[[], None]) -> None:
    """Begin a run with `begin`, and continue it whenever workers leave or join, or servers are lost."""
    said: list[str] = []
    try:
        begin()
        return
    except NodesChanged as first:
        change: NodesChanged | None = first
    while change is not None:
        now, change = change, None
        try:
            _resume(record, show, now.workers, said, now)
        except NodesChanged as again:
            change = again
        finally:
            now.supervisor.close()


def resume(folder: Path, show: Show = lambda standings, steps: None, workers: int | None = None) -> Summary:
    """Continue the run in a folder from its newest complete checkpoint, with the same configuration.

    Events that were recorded after the checkpoint are dropped.

    Args:
        folder: folder of the record.
        show: see `train`.
        workers: number of workers with which the run continues; None: as many as it had.

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
    if not record.unfinished:
        raise ConfigurationError(f"{folder} holds a run that has ended; start another run in another folder")
    with owner.owned(record.path):
        _with_changes(record, show, lambda: _resume(record, show, workers, []))
    return record.read_summary()


def _resume(
    record: RunFolder, show: Show, workers: int | None, said: list[str], left: NodesChanged | None = None
) -> None:
    """Continue a run whose folder this process owns from the newest checkpoint with `workers` workers; None: as many
    as before.

    `said`: sentences for the record, to which this adds. `left`: how the workers have changed, and the processes that
    continue; None: all processes are started.
    """
    config, checkpoint = record.read_config(), newest(record.path)
    config = config_of(record, checkpoint, config)
    engine, plan, again = prepare(config)
    require_resumable(checkpoint, plan.strategy, config.workers, config.digest)
    if (was := config.versions.get(JOB_FILE)) != again.versions.get(JOB_FILE):
        raise ConfigurationError(
            f"{config.job} has changed since the run began (its hash was {was}); restore this file"
        )
    change = None
    if workers is not None and workers != config.workers:
        gone = () if left is None else left.gone
        change = resized_run(checkpoint, engine, plan, config, workers, gone, evaluated_in(record))
        plan, config = change.plan, change.config
        require_open_files(plan.cluster.workers + plan.cluster.servers)
    every, policy, steps = plan.evaluate_every, plan.result, plan.steps
    del engine, plan
    release()
    with record.resumed(checkpoint.manifest.seconds, held=True) as dropped:
        where = f"from step {min(checkpoint.manifest.steps.values())}; {dropped} recorded steps were repeated"
        said.append(f"resumed {where}" if left is None else f"{left}; {left.others} continued {where}")
        if left is not None:
            on_stderr(said[-1])
        if change is not None:
            checkpoint = change.write(record, checkpoint)
            said += change.notes
        if config != record.read_config():
            record.write_config(config)
        shown, here = partial(_shown, show, steps), OtherHosts()
        _train(config, record, every, policy, shown, here, None, checkpoint, said, left)


def evaluated_in(record: RunFolder) -> set[float]:
    """Seconds of the evaluations in a record."""
    return {event.seconds for event in record.read_events() if isinstance(event, EvaluationEvent)}


def _shown(show: Show, steps: int, nodes: dict[Address, NodeProgress]) -> None:
    show(nodes, steps)


def train_for(gathering: Gathering, config: RunConfig) -> None:
    """Start and watch this host's workers of a run that another host coordinates.

    Raises:
        ConfigurationError: the coordinator refused, or cannot be reached.
        RunError: the run failed.
    """
    refuse_program()

    def start_worker(node_spec: NodeSpec, accepted: Accepted) -> Child:
        theirs = RunConfig.from_toml(accepted.config, "the coordinator's configuration")
        ours = dataclasses.replace(theirs, job=config.job, imports=config.imports)  # files, as they are called here
        return fork(worker_main, (node_spec, config.threads or 1, ours.to_toml()), kernels=True)

    gathering.serve(config, settings_of(config), start_worker)


def _train(
    config: RunConfig,
    record: RunFolder,
    every: int,
    policy: ResultPolicy,
    show: Callable[[dict[Address, NodeProgress]], None],
    hosts: OtherHosts,
    test: OwnData | None,
    resumed: Checkpoint | None = None,
    said: Sequence[str] = (),
    left: NodesChanged | None = None,
) -> None:
    evaluation = Evaluator(record.path.resolve(), config.threads or 1, test)
    checkpoints = None
    if not any(map(hosts.has, range(config.workers))):
        interval, keep = config.checkpoint_interval, config.keep or KEEP
        checkpoints = Checkpointer(record.path.resolve(), interval, keep, resumed, evaluation.pending, config.digest)
        for item in checkpoints.resume_snapshots(record.path.resolve() / SNAPSHOTS, evaluated_in(record)):
            evaluation.take(item)
    transport = Transport.parse(config.transport or "shared_memory")

    def start_worker(node_spec: NodeSpec) -> Child:
        before = None if left is None else left.remaining.get(node_spec.address)
        if left is not None and before is not None and left.supervisor.reaches(before):
            return left.supervisor.begin_again(before, node_spec, config.to_toml())
        return fork(worker_main, (node_spec, config.threads or 1, config.to_toml()), kernels=transport.zero_copy)

    epoch = 0 if left is None else left.epoch + 1
    back_to = None if config.checkpoint_every is None else 0
    if back_to is not None and resumed is not None and left is not None and not left.gone:
        back_to = min(resumed.manifest.steps.values()) + 1  # a server that is lost again and again ends the run
    supervisor = Supervisor(
        config.workers,
        transport,
        config.heartbeat or HEARTBEAT,
        record.path.resolve(),
        start_worker,
        start_server,
        show,
        step_timeout=config.step_timeout,
        link_timeout=link_timeout_of(config),
        evaluation=evaluation,
        seed=config.seed,
        imports=config.imports,
        bad_gradients=config.bad_gradients,
        every=every,
        hosts=hosts,
        checkpoints=checkpoints,
        least=config.min_workers,
        most=config.max_workers,
        requests=JoinRequests(record.path.resolve()) if left is None else left.supervisor.requests,
        epoch=epoch,
        back_to=back_to,
    )
    with finished(record, config) as notes:
        notes += said
        outcome = supervisor.run()
        try:
            error = settle(record, evaluation, policy, outcome)
        finally:
            supervisor.forget()
        if left is not None and supervisor.began is not None:
            seconds = supervisor.began - left.since
            notes.append(f"no worker trained for {seconds:.2f} s while the workers changed ({left})")
        notes += outcome.warnings
        notes += [] if checkpoints is None else checkpoints.notes
        if evaluation.skipped:
            notes.append(
                f"{len(evaluation.skipped)} evaluations were skipped because snapshots arrived faster than the model "
                "could be evaluated; raise evaluate_every to evaluate less often"
            )
        if outcome.change is not None:
            raise NodesChanged(outcome.change, supervisor, config.workers, epoch)
        if error is not None:
            raise error
        record.check_whole(outcome.nodes)


def settle(record: RunFolder, evaluation: Evaluator, policy: ResultPolicy, outcome: Outcome) -> FlockstepError | None:
    """Wait until all snapshots are evaluated, and complete the record; return the reason if the run failed."""
    try:
        error = evaluation.finish()
    finally:
        owner.check(record.path)
        with EventWriter(record.node_events_file(None)) as events:
            for event in outcome.events:
                events.write(event)
        if not record.result_file.exists():  # the evaluation did not finish
            keep_newest(record, policy, outcome)
    return outcome.error or error


def keep_newest(record: RunFolder, policy: ResultPolicy, outcome: Outcome) -> None:
    """Write the newest snapshots as the run's result, selected by `policy` without an evaluation."""
    tick = outcome.newest.tick(outcome.lost)
    params = newest_model(tick, policy, outcome)
    if params is not None and outcome.schema is not None:
        record.write_result(params, outcome.schema)
        with EventWriter(record.node_events_file(None)) as events:
            events.write(ResultEvent(tick.t, tick.steps / tick.workers, tick.workers))


def newest_model(tick: SnapshotTick, policy: ResultPolicy, outcome: Outcome) -> FlatArray | None:
    """The model that a policy selects from the newest snapshots; None if there is none."""
    if not tick.workers or outcome.strategy is None or outcome.schema is None:
        return None
    return tick.model(policy, outcome.strategy.held(outcome.workers, outcome.schema.size))


class TargetReached(Exception):
    """Raised after the evaluation that reaches the target of a run that ends at its target."""


def until_target(config: RunConfig, emit: Emit) -> Emit:
    """Wrap `emit`: pass on every event, and raise `TargetReached` after the first evaluation that reaches
    the target.
    """

    def heard(event: Event) -> None:
        emit(event)
        if isinstance(event, EvaluationEvent) and reaches(config, event.metric):
            raise TargetReached

    return heard


@contextlib.contextmanager
def finished(record: RunFolder, config: RunConfig) -> Iterator[list[str]]:
    """Context manager around a run: however the run ends, its record gets a summary with the run's status and notes."""
    status: Status = "failed"
    text, notes = None, list[str]()
    try:
        yield notes
        status = "finished"
    except (KeyboardInterrupt, Interrupted) as error:
        status, text = "interrupted", str(error) or "interrupted"
        raise
    except Exception as error:
        status, text = "diverged" if isinstance(error, Diverged) else "failed", str(error)
        raise
    finally:
        if owner.is_ours(record.path):
            with undisturbed():
                record.write_summary(summarize(config, record.merge_events(), status, text, notes))
