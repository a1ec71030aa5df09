"""The one loop of a run: its segments, each from the start or a change of the workers to the next change or the end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from flockstep.errors import ConfigurationError, FlockstepError, Interrupted
from flockstep.launchers.admission import Admission
from flockstep.launchers.checkpoints import Checkpointer, require_resumable
from flockstep.launchers.children import Child
from flockstep.launchers.collection import Collection
from flockstep.launchers.completion import finished
from flockstep.launchers.continuing import config_of, keep_configs, moved
from flockstep.launchers.evaluation import SnapshotHandler
from flockstep.launchers.executable import AS_THE_SCRIPT_SAYS, Executable, Show
from flockstep.launchers.gathering import HEARTBEAT, Gathering, link_timeout_of
from flockstep.launchers.hosts import OtherHosts
from flockstep.launchers.join_requests import JoinRequests
from flockstep.launchers.newcomers import Newcomers
from flockstep.launchers.node_changes import Members
from flockstep.launchers.open_files import require_open_files
from flockstep.launchers.peers import Change, Outcome, RunPeers
from flockstep.launchers.supervisor import Supervisor
from flockstep.launchers.wait_monitor import on_stderr
from flockstep.records import owner
from flockstep.records.checkpoints import Checkpoint, newest
from flockstep.records.config import KEEP, RunConfig
from flockstep.records.events import EvaluationEvent, Event, NoteEvent, ResultEvent
from flockstep.records.folder import EventWriter, RunFolder
from flockstep.records.snapshots import SNAPSHOTS
from flockstep.records.summary import Summary
from flockstep.records.tape import new_segment
from flockstep.runtime.member import NodeSpec, folder_of_call, run_of_call
from flockstep.runtime.snapshot_tracker import NewestSnapshots
from flockstep.strategies.base import ResultPolicy


class NodesChanged(Interrupted):
    """Raised when the nodes of a run change. The processes of a job's other workers wait to continue, as do those of a
    script that go on `at_once`; other scripts have ended, and begin again.
    """

    def __init__(self, change: Change, supervisor: Supervisor):
        super().__init__(change.reason)
        self.supervisor, self.gone, self.since = supervisor, change.gone, change.since
        self.at_once, self.ends = change.at_once, change.ends
        """Whether workers go on with what their processes hold, and why the run then ends with a checkpoint."""
        self.went = supervisor.members.went if supervisor.peers.went is None else supervisor.peers.went
        """When the run began, by the monotonic clock; None if no worker has trained."""
        self.epoch, workers = supervisor.members.epoch, supervisor.peers.workers
        self.lost = supervisor.outcome.lost.values()
        """The losses of the segment that has ended."""
        restarted = "the run" if change.joined else "the workers, and new servers,"
        self.others = "the other workers" if change.gone else restarted
        """Who continues, for a sentence."""
        staying = [rank for rank in range(workers) if rank not in change.gone]
        self.workers = len(staying) + change.joined
        """Number of workers from now on."""
        # If the number of workers stays, ranks are kept, and workers that join take the places of others; but not if
        # the checkpoint lacks workers that were lost before it.
        same = self.workers == workers and not change.renamed
        self.remaining = {rank if same else new: rank for new, rank in enumerate(staying)}
        """New rank → old rank of the workers whose processes continue."""


@dataclass
class SupervisedRun:
    """A run that this process supervises, over all changes of its workers."""

    record: RunFolder
    executable: Executable
    show: Show
    hosts: OtherHosts = field(default_factory=OtherHosts)

    def run(self, config: RunConfig, checkpoint: Checkpoint | None = None) -> None:
        """Supervise the run, and complete its record; continue whenever the nodes change.

        Args:
            config: the configuration with which the run begins.
            checkpoint: the checkpoint from which it begins; None: it begins at its start.

        Raises:
            RunError: the run failed, or a part of its record was lost.
        """
        left: NodesChanged | None = None
        try:
            while True:
                before = left
                try:
                    RunSegment(self, config, checkpoint, left).supervise()
                    return
                except NodesChanged as change:
                    left = change
                finally:
                    if before is not None:  # workers that waited got their place in the segment over its connections
                        before.supervisor.close()
                if self.executable.script and not left.at_once:
                    left.supervisor.members.newcomers.end()
                if left.at_once:
                    config, checkpoint = self.without(left), None
                else:
                    config, checkpoint = self.continued(left.workers, left)
        finally:
            if left is not None:
                left.supervisor.close()
                left.supervisor.members.newcomers.end()
                left.supervisor.collection.evaluation.close()

    def without(self, left: NodesChanged) -> RunConfig:
        """Let the record go on with the workers that live, which go on with what their processes hold; return the
        run's configuration from now on.
        """
        former, outcome = unnamed(self.record.read_config()), left.supervisor.outcome
        config = self.executable.without_stop(former, left.workers)
        keep_configs(self.record, former, config)
        text = f"{left}; {left.others} {'complete' if left.ends else 'continued with'} the step in hand"
        on_stderr(text)
        assert left.went is not None
        self.record.set_aside(range(min(left.workers, len(left.remaining)), former.workers), left.epoch + 1)
        self.record.note(left.since - left.went, [text, *outcome.warnings], left.lost)
        self.record.write_config(config)
        return config

    def continued(self, workers: int | None, left: NodesChanged | None = None) -> tuple[RunConfig, Checkpoint]:
        """Let the record, whose folder this process owns, go on from its newest checkpoint.

        Args:
            workers: number of workers from now on; None: as many as the checkpoint holds.
            left: how the nodes have changed; None: the run had stopped.

        Returns:
            The configuration and the checkpoint with which the run continues.

        Raises:
            ConfigurationError: the run cannot continue from the checkpoint, or not with so many workers.
            CompositionError: the strategy has no rule for another number of workers.
        """
        record, checkpoint = self.record, newest(self.record.path)
        manifest, config = checkpoint.manifest, config_of(record, checkpoint, unnamed(record.read_config()))
        strategy = self.executable.prepare_again(config, begins=left is None)
        require_resumable(checkpoint, strategy, config.workers, config.digest)
        workers = workers or len(manifest.steps) // manifest.replica_size * config.processes_of_replica
        size = self.executable.replica_size or config.replica_size
        change, asked = None, dataclasses.replace(config, workers=workers, replica_size=size)
        if asked != config or manifest.lost:
            gone = () if left is None else left.gone
            change = self.executable.resized(checkpoint, config, asked, gone, record)
            config = change.config
            require_open_files(len(change.plan.cluster.processes))
        # Events after the checkpoint are dropped first: what is written from here on belongs to the continued run.
        with record.resumed(manifest.seconds, manifest.steps, held=True) as (dropped, lost):
            counted = f", counted with {manifest.workers} workers" if left and left.workers != manifest.workers else ""
            where = f"from step {min(manifest.steps.values())}{counted}; {dropped} recorded steps were repeated"
            said = [f"resumed {where}" if left is None else f"{left}; {left.others} continued {where}", *lost]
            for text in said if left is not None else lost:
                on_stderr(text)
            if change is not None:
                checkpoint = change.write(record, checkpoint)
                said += change.notes
            record.note(manifest.seconds, said, () if left is None else left.lost)
            if config != record.read_config():
                record.write_config(config)
        return config, checkpoint


def resume_run(
    record: RunFolder,
    executable: Executable,
    show: Show,
    workers: int | None,
    gathering: Gathering | None,
    settings: dict[str, str],
) -> Summary:
    """Continue a run from its newest complete checkpoint, and return the summary of the record; events that were
    recorded after the checkpoint are dropped.

    Args:
        record: the run's folder.
        executable: what its workers execute.
        show: shows the state of the nodes.
        workers: number of workers with which the run continues; None for the number that it had.
        gathering: the hosts of the run from now on; None: all processes are on this machine.
        settings: names and hashes of the files that must be equal on all hosts.

    Raises:
        ConfigurationError: the folder holds no run that can continue; nothing was started.
        CompositionError: the strategy has no rule for another number of workers; nothing was started.
        RunError: the run failed; the record is complete up to the failure.
    """
    if not record.unfinished:
        raise ConfigurationError(f"{record.path} holds a run that has ended; start another run in another folder")
    with owner.owned(record.path), ExitStack() as stack:
        run = SupervisedRun(record, executable, show)
        config, checkpoint = run.continued(workers)
        if gathering is not None:
            config = moved(record, config, gathering)
            run.hosts = gathering.hosts(config, settings, stack, resumes=True)
        run.run(config, checkpoint)
    return record.read_summary()


def unnamed(config: RunConfig) -> RunConfig:
    """Return the configuration before a script has named its strategy; unchanged if the user has given the strategy."""
    if config.kind != "launch" or config.strategy_given:
        return config
    return dataclasses.replace(config, strategy=AS_THE_SCRIPT_SAYS)


@dataclass
class RunSegment:
    """A run from its start, or a change of its nodes, to the next change or the end."""

    run: SupervisedRun
    config: RunConfig
    resumed: Checkpoint | None
    """The checkpoint from which the run continues; None if it begins at its start."""
    left: NodesChanged | None
    """The change of nodes after which this segment begins, with the processes that continue; None if all processes are
    to be started.
    """
    later: list[tuple[RunFolder, ExitStack]] = field(default_factory=list)
    """Records of a script's later calls of `distribute`, with what owns their folders."""

    def supervise(self) -> None:
        """Start the processes, supervise the run, and complete the record.

        Raises:
            NodesChanged: the run continues with other nodes.
            RunError: the run failed.
        """
        executable = self.run.executable
        evaluation, checkpoints, supervisor = self._supervised()
        outcome = supervisor.outcome
        notes, events, error = outcome.warnings, outcome.events, outcome.error
        notes[:0] = executable.notes
        notes += [] if checkpoints is None else checkpoints.notes
        if self.later:
            where = ", ".join(later.path.name for later, _ in self.later)
            notes.append(
                "this record describes the script's first call of distribute; the records of later calls are in "
                f"{where}"
            )
        if error is not None and supervisor.failed_later:
            notes.append(f"the script failed in a later call of distribute: {error}")
            outcome.error = None
        if outcome.change is not None and error is None:
            outcome.error = NodesChanged(outcome.change, supervisor)
        events += self._pause(supervisor)
        try:
            conclude(self.run.record, self.config, outcome, evaluation, executable.policy, events)
        finally:
            evaluation.close()
            supervisor.collection.forget()
        if error is not None:
            raise error  # of a later call

    def _supervised(self) -> tuple[SnapshotHandler, Checkpointer | None, Supervisor]:
        """Start the processes, and return what has supervised them until the run's end or a change of the nodes.

        Raises:
            NodesChanged: scripts go on with what their processes hold, and so does the record.
        """
        record, executable, left, resumed = self.run.record, self.run.executable, self.left, self.resumed
        path, checkpoints, stay = record.path.resolve(), None, False
        before = left.supervisor if left is not None and left.at_once else None
        if left is None or before is None:
            executable.begin(self.config)
        else:
            executable.go_on(self.config, left.remaining)
        try:
            evaluation = executable.evaluation(path) if before is None else before.collection.evaluation
            if before is not None:
                evaluation.go_on(self.config)
            if executable.checkpoints:
                checkpoints = Checkpointer(
                    path,
                    self.config.checkpoint_interval,
                    self.config.keep or KEEP,
                    resumed,
                    evaluation.pending,
                    unnamed(self.config).digest,
                    scripts=executable.script,
                    hosts=self.run.hosts,
                )
                if before is not None and before.checkpoints is not None:
                    checkpoints.follow(before.checkpoints)
                if resumed is not None:  # snapshots that the run had not evaluated at the checkpoint are evaluated now
                    for item in checkpoints.resume_snapshots(path / SNAPSHOTS, evaluated_in(record)):
                        evaluation.take(item)
            supervisor = self.supervisor(path, evaluation, checkpoints)
            outcome = supervisor.run()
            change = None if outcome.error is not None else outcome.change
            stay = change is not None and change.at_once
        finally:
            if not stay:
                executable.end()
            if before is not None:
                before.hear_rest()  # also if the run has failed before all had met
        if change is not None and stay:
            notes = [] if checkpoints is None else checkpoints.notes
            for paused in self._pause(supervisor):
                record.note(paused.seconds, [paused.text, *notes])
            raise NodesChanged(change, supervisor)
        return evaluation, checkpoints, supervisor

    def _pause(self, supervisor: Supervisor) -> list[NoteEvent]:
        """How long no worker trained before this segment, if it begins with a change."""
        left, began, went = self.left, supervisor.admission.began, supervisor.peers.went
        if left is None or began is None or went is None:
            return []
        since = left.since - went if self.resumed is None else self.resumed.manifest.seconds
        text = f"no worker trained for {began - left.since:.2f} s while the workers changed ({left})"
        return [NoteEvent(since, text)]

    def supervisor(
        self,
        place: Path,
        evaluation: SnapshotHandler | None = None,
        checkpoints: Checkpointer | None = None,
        first: Supervisor | None = None,
    ) -> Supervisor:
        """Return the supervisor of the run, or of a later call of `distribute` after that of the `first` one, whose
        record is in `place`.
        """
        run, left, config, executable = self.run, self.left, self.config, self.run.executable
        if first is None:
            number, name, secret = 1, secrets.token_hex(8), secrets.token_hex(32)
        else:
            number, secret = len(self.later) + 1, first.admission.spec.secret
            name = run_of_call(first.admission.spec.run, number)
        spec = NodeSpec(
            name,
            address=0,
            control="",
            directory="",
            transport=config.transport or "shared_memory",
            heartbeat=config.heartbeat or HEARTBEAT,
            record=str(place),
            workers=config.workers,
            replica_size=config.processes_of_replica,
            replica_over_hosts=bool(config.replica_over_hosts),
            supervisor=os.getpid(),
            seed=config.seed,
            strategy=config.strategy if config.strategy_given else "",
            imports=config.imports,
            bad_gradients=config.bad_gradients,
            secret=secret,
            call=number,
            link_timeout=link_timeout_of(config),
            facts=None if executable.parts is None else executable.parts.facts,
            changes=run.hosts.here and (config.min_workers, config.max_workers) != (None, None),
            follows=executable.follows(number),
            tapes=str(new_segment(place, config.to_toml())) if config.replayable else "",
            checkpoint="" if self.resumed is None or first is not None else str(self.resumed.folder.absolute()),
        )
        # After the loss of a server, the run needs a newer checkpoint to survive another loss, so that repeated losses
        # end the run. A split model, or a script on several hosts, ends with its server.
        back_to, goes_back = None, executable.parts is None and (run.hosts.here or not executable.script)
        if config.checkpoint_every is not None and goes_back:
            back_to = 0
            if self.resumed is not None and left is not None and not left.gone:
                back_to = min(self.resumed.manifest.steps.values()) + 1
        if left is None:
            newcomers = executable.newcomers() if first is None else Newcomers()
            members = Members(JoinRequests(place), newcomers, back_to=back_to)
        else:
            run.hosts.rearrange(left.remaining, config.workers, config.to_toml())
            before, joining = left.supervisor.members, set(range(config.workers)) - left.remaining.keys()
            went = left.went if left.at_once else None
            step, hear = left.supervisor.peers.least_step, left.supervisor.hear_rest
            members = Members(before.requests, before.newcomers, joining, left.epoch + 1, went, step, back_to=back_to)
            if left.at_once:
                members = dataclasses.replace(members, ends=left.ends, hear_rest=hear)
        sizes = () if executable.parts is None else executable.parts.sizes
        outcome = Outcome(
            config.workers, sizes=sizes, newest=NewestSnapshots(len(sizes) or config.processes_of_replica)
        )
        peers = RunPeers(config.workers, spec.heartbeat, members.epoch, executable.unjoined)
        within = None if first is None else first.admission
        admission = Admission(spec, executable, peers, outcome, self.start_worker, run.hosts, within)
        collection = Collection(
            peers, outcome, place, executable.script, evaluation, lambda peers: run.show(peers, executable.steps)
        )
        return Supervisor(config, admission, collection, members, self, checkpoints, first)

    def start_worker(self, node_spec: NodeSpec) -> Child | None:
        """Let a process that continues, or one that has prepared to join, take part; otherwise start one."""
        config, left, hosts, executable = self.config, self.left, self.run.hosts, self.run.executable
        stay = left is not None and (left.at_once or not executable.script)
        if left is not None and stay and node_spec.address in left.remaining:
            before, again = left.remaining[node_spec.address], hosts.again(node_spec)
            if left.supervisor.peers[before].link is not None:
                return left.supervisor.begin_again(before, again, config.to_toml())
        if left is not None and left.at_once:
            node_spec = dataclasses.replace(node_spec, joins=True)
        if hosts.has(node_spec.address):
            return hosts.start(node_spec, config="" if left is None else config.to_toml())
        if left is not None and (newcomer := left.supervisor.members.newcomers.next()) is not None:
            return executable.adopt(node_spec.address, newcomer.begin(node_spec, config))
        return executable.start(node_spec)

    def begin_call(self, first: Supervisor, number: int) -> Supervisor:
        """Create the record and the supervisor of a later call of `distribute`."""
        record, owning = RunFolder(folder_of_call(self.run.record.path.resolve(), number)), ExitStack()
        owning.enter_context(record.created(self.config))
        self.later.append((record, owning))
        return self.supervisor(record.path, first=first)

    def end_call(self, number: int, outcome: Outcome) -> None:
        """Complete the record of a later call."""
        record, owning = self.later[number - 2]
        with owning, contextlib.suppress(FlockstepError) if outcome.error else contextlib.nullcontext():
            conclude(record, self.config, outcome)


def evaluated_in(record: RunFolder) -> set[float]:
    """Return the times of the evaluations in a record, in seconds of the run."""
    return {event.seconds for event in record.read_events() if isinstance(event, EvaluationEvent)}


def conclude(
    record: RunFolder,
    config: RunConfig,
    outcome: Outcome,
    evaluation: SnapshotHandler | None = None,
    policy: ResultPolicy | None = None,
    events: Iterable[Event] | None = None,
) -> None:
    """Complete the record of a run that has ended: wait until all snapshots are evaluated, and write the result and the
    facts that only the supervisor knows.

    Args:
        record: the run's folder.
        config: its configuration.
        outcome: what the supervisor knows.
        evaluation: handles the snapshots; None: nothing is evaluated.
        policy: which model is the result, if no evaluation selects it; None: what the strategy names first.
        events: the launcher's events; None for those of the outcome.

    Raises:
        RunError: the run failed, or a part of its record was lost.
    """
    owner.check(record.path)
    strategy = outcome.strategy
    try:
        if strategy is not None and strategy.traits.results and config.strategy == AS_THE_SCRIPT_SAYS:
            config = dataclasses.replace(config, strategy=str(strategy))
            record.write_config(config)
        with finished(record, config) as notes:
            notes += outcome.warnings
            failure = None
            try:
                if evaluation is not None:
                    failure = evaluation.finish()
                    notes += evaluation.notes
            finally:
                owner.check(record.path)
                with EventWriter(record.node_events_file(None)) as writer:
                    for event in outcome.events if events is None else events:
                        writer.write(event)
                    # Where no evaluation has chosen the result, it is chosen from the newest snapshots.
                    result = None if record.result_file.exists() else outcome.newest_model(policy)
                    if result is not None and outcome.schema is not None:
                        tick, params = result
                        record.write_result(params, outcome.schema)
                        writer.write(ResultEvent(tick.t, tick.steps / tick.workers, tick.workers))
            if (error := outcome.error or failure) is not None:
                raise error
            record.check_whole(outcome.nodes)
    except OSError:  # where the disk does not take the files, the error that has ended the run says more
        if outcome.error is None:
            raise
        raise outcome.error from None
