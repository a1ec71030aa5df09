"""Supervises a segment of a declared job's run: from the start or a change of nodes to the next change or the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flockstep.errors import Interrupted
from flockstep.launchers.checkpoints import Checkpointer
from flockstep.launchers.children import KERNELS, Child, fork
from flockstep.launchers.completion import finished, settle
from flockstep.launchers.entry import start_server, worker_main
from flockstep.launchers.evaluation import Evaluator
from flockstep.launchers.hosts import OtherHosts
from flockstep.launchers.initial_parts import InitialParts
from flockstep.launchers.join_requests import JoinRequests
from flockstep.launchers.newcomers import Newcomer, Newcomers
from flockstep.launchers.node_changes import Members
from flockstep.launchers.peers import Change, RunPeer
from flockstep.launchers.resizing import ResizedRun
from flockstep.launchers.supervisor import RunOfJob, Starters, Supervisor
from flockstep.launchers.wait_monitor import on_stderr
from flockstep.links.kinds import Transport
from flockstep.messages import Address
from flockstep.records.checkpoints import Checkpoint
from flockstep.records.config import KEEP, RunConfig
from flockstep.records.events import EvaluationEvent
from flockstep.records.folder import RunFolder
from flockstep.records.snapshots import SNAPSHOTS
from flockstep.runtime.member import NodeSpec
from flockstep.strategies.base import ResultPolicy
from flockstep.workloads.own_data import OwnData

Show = Callable[[dict[Address, RunPeer], int], None]
_RESTARTED = "the workers, and new servers,"


class NodesChanged(Interrupted):
    """Raised when the nodes of a run change, while the processes of the other workers wait to continue."""

    def __init__(self, change: Change, supervisor: Supervisor):
        super().__init__(change.reason)
        self.supervisor, self.gone, self.since = supervisor, change.gone, change.since
        self.epoch, workers = supervisor.members.epoch, supervisor.peers.workers
        self.lost = supervisor.outcome.lost.values()
        """The losses of the segment that has ended."""
        self.others = "the other workers" if change.gone else "the run" if change.joined else _RESTARTED
        """Who continues, for a sentence."""
        staying = [rank for rank in range(workers) if rank not in change.gone]
        self.workers = len(staying) + change.joined
        """Number of workers from now on."""
        same = (
            self.workers == workers and not change.renamed
        )  # then ranks are kept, and workers that join take the places of others
        self.remaining = {rank if same else new: rank for new, rank in enumerate(staying)}
        """New rank → old rank of the workers whose processes continue."""

    @property
    def joining(self) -> set[int]:
        """Ranks of the workers that have not trained before the change."""
        return set(range(self.workers)) - self.remaining.keys()


@dataclass(frozen=True)
class RunSegment:
    """A segment of a run of a declared job: from the start, or a change of nodes, to the next change or the end."""

    config: RunConfig
    record: RunFolder
    steps: int
    """Number of steps of each worker."""
    every: int
    """Number of steps of each worker between two evaluations."""
    policy: ResultPolicy
    show: Show
    hosts: OtherHosts
    test: OwnData | None = None
    """Test set in place of the job's test set; None for the job's own."""
    resumed: Checkpoint | None = None
    """The checkpoint from which the run continues; None if the run starts from the beginning."""
    said: Sequence[str] = ()
    """Sentences to be added to the record."""
    left: NodesChanged | None = None
    """The change of nodes after which this segment begins, with the processes that continue; None if all processes are
    to be started.
    """
    parts: InitialParts | None = None
    """The parts of a split model; None if every worker holds a whole replica."""

    def run(self) -> None:
        """Start the processes, supervise the run, and complete the record.

        Raises:
            NodesChanged: the run continues with other nodes.
            RunError: the run failed.
        """
        split = None if self.parts is None else self.parts.facts
        evaluation = Evaluator(self._path, self.config.threads or 1, self.test, split)
        checkpoints = self._checkpointer(evaluation)
        supervisor = self._supervisor(evaluation, checkpoints)
        with finished(self.record, self.config) as notes:
            notes += self.said
            outcome = supervisor.run()
            try:
                error = settle(self.record, evaluation, self.policy, outcome)
            finally:
                supervisor.forget()
            if self.resumed is not None:
                self.record.note(self.resumed.manifest.seconds, pause_notes(self.left, supervisor))
            notes += self._notes(supervisor, evaluation, checkpoints)
            if outcome.change is not None:
                raise NodesChanged(outcome.change, supervisor)
            if error is not None:
                raise error
            self.record.check_whole(outcome.nodes)

    @property
    def _path(self) -> Path:
        return self.record.path.resolve()

    @property
    def _transport(self) -> Transport:
        return Transport.parse(self.config.transport or "shared_memory")

    def _checkpointer(self, evaluation: Evaluator) -> Checkpointer | None:
        """Takes the checkpoints; None if micro-batches are in flight at every time.

        Snapshots that the run had not evaluated at the checkpoint are evaluated now.
        """
        if self.parts is not None and self.parts.delayed:
            return None
        interval, keep, digest = self.config.checkpoint_interval, self.config.keep or KEEP, self.config.digest
        resumed, hosts = self.resumed, self.hosts
        taker = Checkpointer(self._path, interval, keep, resumed, evaluation.pending, digest, hosts=hosts)
        for item in taker.resume_snapshots(self._path / SNAPSHOTS, evaluated_in(self.record)):
            evaluation.take(item)
        return taker

    def _supervisor(self, evaluation: Evaluator, checkpoints: Checkpointer | None) -> Supervisor:
        config, left = self.config, self.left
        back = None if self.parts is not None else back_to(config, self.resumed, left)
        if left is None:
            newcomers = Newcomers(partial(Newcomer, config, self._transport.zero_copy))
            members = Members(JoinRequests(self._path), newcomers, back_to=back)
        else:
            self.hosts.rearrange(left.remaining, config.workers, config.to_toml())
            before = left.supervisor.members
            members = Members(before.requests, before.newcomers, left.joining, left.epoch + 1, back)
        return Supervisor(
            config,
            self._path,
            Starters(self._start_worker, start_server, self.hosts),
            RunOfJob(self.every, self.parts),
            show=lambda peers: self.show(peers, self.steps),
            evaluation=evaluation,
            checkpoints=checkpoints,
            members=members,
        )

    def _start_worker(self, node_spec: NodeSpec) -> Child | None:
        """Let a process that continues, or one that has prepared to join, take part; otherwise start one."""
        config, left = self.config, self.left
        before = None if left is None else left.remaining.get(node_spec.address)
        if left is not None and before is not None and left.supervisor.reaches(before):
            return left.supervisor.begin_again(before, self.hosts.again(node_spec), config.to_toml())
        if self.hosts.has(node_spec.address):
            return self.hosts.start(node_spec, config="" if left is None else config.to_toml())
        if left is not None and (newcomer := left.supervisor.members.newcomers.next()) is not None:
            return newcomer.begin(node_spec, config)
        kernels = [KERNELS] if self._transport.zero_copy else ()
        return fork(worker_main, (node_spec, config.threads or 1, config.to_toml()), kernels)

    def _notes(self, supervisor: Supervisor, evaluation: Evaluator, checkpoints: Checkpointer | None) -> list[str]:
        """Sentences for the record about what has happened."""
        notes = [*supervisor.outcome.warnings]
        notes += [] if checkpoints is None else checkpoints.notes
        if evaluation.skipped:
            notes.append(
                f"{len(evaluation.skipped)} evaluations were skipped because snapshots arrived faster than the model "
                "could be evaluated; raise evaluate_every to evaluate less often"
            )
        return notes


def back_to(config: RunConfig, resumed: Checkpoint | None, left: NodesChanged | None) -> int | None:
    """Return the minimum step of a checkpoint from which the run may continue when a server is lost; None if the loss
    of a server ends the run.

    After the loss of a server, the run needs a newer checkpoint to survive another loss, so repeated losses end the
    run. `resumed` is the checkpoint from which the run has continued, and `left` is the change of nodes before that.
    """
    if config.checkpoint_every is None:
        return None
    if resumed is None or left is None or left.gone:
        return 0
    return min(resumed.manifest.steps.values()) + 1


def continue_record(
    record: RunFolder, config: RunConfig, checkpoint: Checkpoint, change: ResizedRun | None, left: NodesChanged | None
) -> Checkpoint:
    """Let a record go on from a checkpoint with `config`; return the checkpoint, for the new number of workers if there
    is a `change`. `left` is the change of nodes after which the run continues; None if the run had stopped.
    """
    manifest = checkpoint.manifest
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
    return checkpoint


def pause_notes(left: NodesChanged | None, supervisor: Supervisor) -> list[str]:
    """Return a list with one sentence that says for how long no worker trained during a change; an empty list if
    nothing has changed.
    """
    if left is None or supervisor.began is None:
        return []
    return [f"no worker trained for {supervisor.began - left.since:.2f} s while the workers changed ({left})"]


def evaluated_in(record: RunFolder) -> set[float]:
    """Return the times of the evaluations in a record, in seconds of the run."""
    return {event.seconds for event in record.read_events() if isinstance(event, EvaluationEvent)}
