"""Connects the processes of a run, watches them, and collects their events and models."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np

from flockstep.arrays.schema import FlatArray, Schema
from flockstep.communicator.joining import rule_of
from flockstep.drivers.event_sender import MOST, events_in
from flockstep.drivers.member import AGAIN, WINDOW, Failure, Hello, NodeLost, NodeSpec, Welcome, in_short, run_of_call
from flockstep.drivers.node_metrics import fingerprint
from flockstep.drivers.part_group import groups_of
from flockstep.drivers.plan import whole_cluster
from flockstep.drivers.replication import ProgramEvents
from flockstep.drivers.snapshot_tracker import NewestSnapshots
from flockstep.drivers.tracker import FINAL
from flockstep.drivers.whole_model import held_by_servers
from flockstep.errors import ConfigurationError, FlockstepError, Interrupted, PeerLost, ProtocolError, RunError, of_kind
from flockstep.expression import from_data
from flockstep.launchers.backups import is_replaced, replaced
from flockstep.launchers.checkpoints import Checkpointer
from flockstep.launchers.children import ENDED, Child, how_it_ended, kill_all, reap, refuse_unguarded
from flockstep.launchers.communicators import Communicators
from flockstep.launchers.duplicate_batches import DataDigests, GradientFingerprints
from flockstep.launchers.evaluation import SnapshotHandler
from flockstep.launchers.health import Health
from flockstep.launchers.host_messages import ServerSpec
from flockstep.launchers.hosts import NONE_JOINS, OtherHosts
from flockstep.launchers.initial_parts import InitialParts
from flockstep.launchers.join_requests import JoinRequests
from flockstep.launchers.link import ProcessLink
from flockstep.launchers.newcomers import Newcomers
from flockstep.launchers.node_progress import NodeProgress
from flockstep.launchers.open_files import require_open_files
from flockstep.launchers.scratch import scratch
from flockstep.launchers.signals import undisturbed
from flockstep.launchers.wait_monitor import JOINS_JOB, JOINS_SCRIPT, WaitMonitor, on_stderr
from flockstep.messages import Address, AnyNote, Fields, Message, node_name
from flockstep.nodes import BadGradients, Cluster, Hosts, View
from flockstep.optimizers.base import Optimizer
from flockstep.records import owner
from flockstep.records.checkpoints import Checkpoint
from flockstep.records.events import Event, HostsEvent, LostEvent, NodeEvent, StepEvent
from flockstep.records.failpoints import reach
from flockstep.records.flight import FlightEvent, FlightRecorder, append, decoded
from flockstep.records.folder import EventWriter, RunFolder
from flockstep.records.snapshots import LAST, SnapshotWriter, snapshot_folders
from flockstep.strategies.base import Strategy
from flockstep.transports.base import Transport
from flockstep.transports.links import Control, Frames
from flockstep.transports.session import LINK_TIMEOUT
from flockstep.transports.shared_memory import SharedMemory
from flockstep.transports.wire import PROTOCOL

GRACE = 3.0
"""Seconds that processes have to end by themselves after a failure, before they are killed."""
TURN = 4 * WINDOW
"""Number of messages of one node that are handled before the next node's turn, so that no node can monopolize the
supervisor.
"""
LAST_CHECKPOINT = 10.0
"""Longest time in seconds for the checkpoint that is taken when a signal stops the run."""
LEAVE_AGAIN = 10.0
"""Seconds after which workers try again to leave the run, if no checkpoint could be written."""
LAST_POLL = 0.005
"""Seconds between two polls of processes that are about to end."""
POLL = 0.05
"""Seconds between two polls of the processes."""


@dataclass
class Outcome:
    """The result of a supervised run."""

    workers: int = 0
    schema: Schema | None = None
    strategy: Strategy | None = None
    newest: NewestSnapshots = field(default_factory=NewestSnapshots)
    warnings: list[str] = field(default_factory=list)
    hosts: Hosts = ()
    """The workers of each host; empty before all nodes have joined."""
    lost: dict[Address, LostEvent] = field(default_factory=dict)
    error: FlockstepError | None = None
    replaced: set[Address] = field(default_factory=set)
    """Lost processes of servers of which other processes continue."""
    change: Change | None = None
    """How the workers change while the run continues, whose processes still run; None if the run has ended."""
    nodes: set[Address] = field(default_factory=set)
    """Nodes whose events are written to files."""
    sizes: tuple[int, ...] = ()
    """Number of elements of each part of a split model; empty if every worker holds a whole replica."""

    @property
    def held(self) -> list[slice]:
        """Slice of the model that each server holds, once the nodes have joined."""
        assert self.strategy is not None
        assert self.schema is not None
        sizes = self.sizes or (self.schema.size,)
        return held_by_servers(self.strategy, self.workers // len(sizes), sizes)

    @property
    def events(self) -> list[Event]:
        """Events of the record that the supervisor alone knows: the hosts if there are several, and the lost nodes."""
        hosts = [HostsEvent(0.0, self.hosts)] if len(self.hosts) > 1 else []
        return [*hosts, *self.lost.values()]


@dataclass
class Change:
    """Workers that leave a run, are lost, or join it, while the other workers continue; no rank is gone if a server is
    lost.
    """

    gone: set[int]
    reason: str
    joined: int = 0
    """Number of workers that join."""
    since: float = field(default_factory=time.monotonic)
    """Time at which the nodes had stopped, in seconds of the monotonic clock."""


class Supervisor:
    """Supervises one run of `workers` processes and the servers that their strategy needs."""

    _over = False
    """Whether all nodes have been dismissed."""
    _released = False
    """Whether a later call has ended, and its sockets and files are closed."""
    _memory: SharedMemory | None = None
    """Segment of the workers, until all of them have attached to it."""
    _cluster = Cluster(0)
    """The nodes of the run; none until the strategy is known."""
    _program_events = ProgramEvents(_cluster)
    _renewing = ""
    """Sentence on the lost process of a server, in whose place another is to be started; empty if there is none."""
    _condemned: dict[Address, str]
    """Workers to remove from the run, with the reason."""
    _went: float | None = None
    """Time at which all nodes were ready, in seconds of the monotonic clock, less the seconds of the run before."""
    _cutting = False
    """Whether all nodes are asked to stop with their states, so that workers can leave and join."""
    _leave_again: float | None = None
    """Time of the monotonic clock at which workers that could not leave the run try again; None: no attempt failed."""
    began: float | None = None
    """Time at which all nodes were ready, in seconds of the monotonic clock."""

    def __init__(
        self,
        workers: int,
        transport: Transport,
        heartbeat: float,
        record: Path,
        start_worker: Callable[[NodeSpec], Child | None],
        start_server: Callable[[NodeSpec, ServerSpec], Child | None],
        show: Callable[[dict[Address, NodeProgress]], None] = lambda standings: None,
        patience: float | None = GRACE,
        step_timeout: float | None = None,
        evaluation: SnapshotHandler | None = None,
        hosts: OtherHosts | None = None,
        seed: int = 0,
        imports: tuple[str, ...] = (),
        bad_gradients: BadGradients | None = None,
        every: int = 0,
        begin_call: Callable[[Supervisor, int], Supervisor] | None = None,
        within: Supervisor | None = None,
        ended: Callable[[Outcome], None] = lambda outcome: None,
        checkpoints: Checkpointer | None = None,
        least: int | None = None,
        most: int | None = None,
        requests: JoinRequests | None = None,
        newcomers: Newcomers | None = None,
        joining: Collection[int] = (),
        epoch: int = 0,
        link_timeout: float = LINK_TIMEOUT,
        back_to: int | None = None,
        parts: InitialParts | None = None,
    ):
        """`start_worker` and `start_server` return the started process, or None if the process is started by something
        else; `hosts` starts those of other hosts.

        `evaluation` receives the snapshots that nodes send, servers `every` so many steps. `patience`:
        seconds that processes may continue after a successful run; None, for users' scripts, sets no limit and requires
        exit code 0. `begin_call`: creates the supervisor of a script's later call of `distribute`, from that of the
        first call and the number of the call, 2 for the second; for that one, `within` is the first, and `ended`
        receives the outcome of the call once its nodes have left, or the whole run has ended. `checkpoints` takes the
        run's checkpoints, and knows where the run begins. `least`: smallest number of workers with which the run goes
        on from a checkpoint; None: it does not. `most`: largest number of workers when workers join by `requests`,
        in the processes that `newcomers` starts; None: workers may not join. `joining`: ranks of workers that join from
        now on, without which the run continues if they are lost before all nodes are ready. `epoch`: number of changes
        of the workers so far.
        `back_to`: smallest step of a checkpoint from which the run continues when a server is lost; None: a lost
        server ends the run. `parts`: the parts of a split model; None if every worker holds a whole replica.
        """
        sizes, self._initial = () if parts is None else parts.sizes, parts
        self.outcome = Outcome(workers, sizes=sizes, newest=NewestSnapshots(max(1, len(sizes))))
        self.requests, self.newcomers = requests or JoinRequests(record), newcomers or Newcomers()
        self.standings: dict[Address, NodeProgress] = {rank: NodeProgress() for rank in range(workers)}
        self.children: dict[Address, Child] = {}
        self._workers, self._transport = workers, transport
        self._heartbeat, self._link_timeout = heartbeat, link_timeout
        self._start_worker = start_worker
        self._start_server = start_server
        self._record, self._show = record, show
        self._patience = patience
        self._hosts = hosts or OtherHosts()
        self._seed, self._imports = seed, imports
        self._condemned, self._leavers = dict[Address, str](), set[int]()
        self._bad_gradients = bad_gradients or BadGradients()
        self._every, self._back_to, self._joining = every, back_to, frozenset(joining)
        self._begin_call, self._checkpoints, self._least, self._most = begin_call, checkpoints, least, most
        self._calls: list[Supervisor] = [self] if within is None else within._calls
        """Supervisors of the calls of `distribute` that the scripts have begun; the first one watches the processes."""
        self._number = 1 if within is None else len(self._calls) + 1
        self._asked: set[int] = set()
        """Workers that have begun this call, if it is a later one."""
        self._ended = ended
        self._run: str = secrets.token_hex(8) if within is None else run_of_call(within._run, self._number)
        self._secret: bytes = secrets.token_bytes(32) if within is None else within._secret
        self._evaluation, self._places = evaluation or SnapshotHandler(), snapshot_folders(record, self._run)
        self._directory, self._open = Path(), contextlib.ExitStack()
        self._links: dict[Address, ProcessLink] = {}
        self._writers: dict[Address, EventWriter] = {}
        self._arriving: dict[Address, SnapshotWriter] = {}
        self._flight = FlightRecorder()
        self._health = Health(self.children, self._links, heartbeat)
        self._hashes: dict[Address, str] = {}
        self._ready, self._done, self._gone = set[Address](), set[Address](), set[Address]()
        self._wait_monitor = WaitMonitor(workers, step_timeout, joins=JOINS_SCRIPT if patience is None else JOINS_JOB)
        self._view = View(epoch, tuple(range(workers)))
        self._losses: dict[Address, NodeLost] = {}
        self._communicators = Communicators(workers, self._losses, self._done)
        self._draws: dict[str, GradientFingerprints | DataDigests] = {
            "gradient": GradientFingerprints(workers),
            "data": DataDigests(workers),
        }

    def run(self, result: Callable[[Outcome], FlatArray | None] = lambda outcome: None) -> Outcome:
        """Start the processes, wait for the end, and tell the nodes that the run has ended.

        `result` selects the model that is returned to them.

        Errors of the run are never raised; `outcome.error` holds them.
        """
        try:
            self._start()
            self._watch(result)
            if self.outcome.change is not None:
                self._let_go(self.outcome.change)
                return self.outcome
            reach("run.ended")
        except FlockstepError as error:
            self.outcome.error = error
        except KeyboardInterrupt as stop:
            where = self._last_checkpoint()
            self.outcome.error = Interrupted(
                f"{str(stop) or 'interrupted'}; everything computed so far is in the record{where}"
            )
        except Exception as error:  # noqa: BLE001 - of the system: no folder for the sockets, no more processes, …
            self.outcome.error = RunError(f"the run could not be supervised: {in_short(error)}")
            self.outcome.error.__cause__ = error
        try:
            self._end_all()
        except KeyboardInterrupt:  # a second request to end
            kill_all(self._processes())
            why = self.outcome.error = self.outcome.error or Interrupted("interrupted after the run had ended")
            self._hosts.close(str(why), why.exit_code)
        if self._hosts.rejected:
            many = f"{self._hosts.rejected} connections to the coordinator's port were rejected"
            self.outcome.warnings.append(many)
        self._clean_up()
        self._refuse_joiners("the run ended before the workers took part")
        return self.outcome

    def reaches(self, rank: int) -> bool:
        """Whether the process of a worker is connected, so that it can take part again."""
        return rank in self._links

    def begin_again(self, rank: int, node_spec: NodeSpec, config: str) -> Child:
        """Let the process of a worker take part by another node specification; return the process."""
        self._links[rank].tell(AGAIN, {"spec": msgspec.json.encode(node_spec).decode(), "config": config, "wait": 0})
        return self.children.pop(rank)

    def _let_go(self, change: Change) -> None:
        """Let the workers that stay wait until the run continues, and let all other processes end."""
        for address, child in self.children.items():
            if address not in self._links:
                child.kill()
        for address, link in self._links.items():
            stays = address >= 0 and address not in change.gone
            link.tell(AGAIN, {"spec": "", "config": "", "wait": int(stays)})

    def close(self) -> None:
        """End the remaining processes of a run that continues with other workers, and close the connections."""
        kill_all(self._processes())
        self._clean_up()

    def _last_checkpoint(self) -> str:
        """Take a checkpoint, because a signal ends the run; return where the run goes on, for a sentence."""
        if self._checkpoints is None or self._checkpoints.unused:
            return ""
        self._least = None  # no worker leaves a run that ends
        why, kept = self._why_no_checkpoint(self._checkpoints), self._checkpoints.newest
        if kept is None and self._went is None:
            return ""
        missing = f"; no checkpoint was taken at the end, because {why}" if why else ""
        if kept is None:
            return missing
        where = f"; flockstep resume {self._record} continues from step {min(kept.steps.values())}"
        return f"{missing}{where}, the step of the previous checkpoint" if why else where

    def _why_no_checkpoint(self, checkpoints: Checkpointer) -> str:
        """Take a checkpoint, because a signal ends the run; return why there is none, and nothing if there is one."""
        began = time.monotonic()
        if self._went is None:
            return "training had not begun"
        try:
            if self._finished():
                return "all workers had taken their last step"
            checkpoints.stop()
            stop = self._time_to_stop(began - self._went)
            while checkpoints.busy:
                most = stop if checkpoints.stopping else LAST_CHECKPOINT
                if time.monotonic() >= began + most:
                    what = "not all workers had stopped" if checkpoints.stopping else "it was not written"
                    return f"{what} within {most:.2g} s"
                self._poll()
                self._look_after_children()
        except FlockstepError as error:
            return str(error)
        except KeyboardInterrupt:
            return "a second signal ended the run at once"
        return checkpoints.why_not

    def _time_to_stop(self, seconds: float) -> float:
        """Seconds after which a worker that has not come to the end of a step hangs: five steps of mean length.

        `seconds` of the run so far.
        """
        steps = min(one.step for address, one in self.standings.items() if address >= 0)
        return min(max(5 * seconds / max(steps, 1), 1.0), LAST_CHECKPOINT)

    def forget(self) -> None:
        """Remove the snapshots that nodes have sent."""
        self.outcome.newest = NewestSnapshots()
        for place in self._places:
            shutil.rmtree(place, ignore_errors=True)

    @property
    def failed_later(self) -> bool:
        """Whether the run failed in a later call of `distribute`, after the first call had ended well."""
        return self._over and not all(one._over for one in self._calls)

    def _start(self) -> None:
        self._directory = self._open.enter_context(scratch())
        self._open.callback(self._transport.clean_up, self._directory)
        self._transport.prepare(self._directory)
        self._control = Control(f"ipc://{self._directory / 'control'}", self._heartbeat)
        self._open.callback(self._control.close)
        self._hosts.why_not_join, self._hosts.let_leave = self._why_no_host_joins, self._let_leave
        self._hosts.meet()
        for rank in range(self._workers):
            self._keep_child(rank, self._start_worker(self._node_spec(rank)))

    def _keep_child(self, address: Address, child: Child | None) -> None:
        if child is not None:
            self.children[address] = child

    def _node_spec(self, address: Address) -> NodeSpec:
        return NodeSpec(
            self._run,
            address,
            self._control.address,
            str(self._directory),
            str(self._transport),
            self._heartbeat,
            str(self._record),
            self._workers,
            os.getpid(),
            seed=self._seed,
            imports=self._imports,
            bad_gradients=self._bad_gradients,
            secret=self._secret.hex(),
            call=self._number,
            link_timeout=self._link_timeout,
            cut=None if self._initial is None else self._initial.cut,
            checkpoint="" if (resumed := self._resumed()) is None else str(resumed.folder),
        )

    def _resumed(self) -> Checkpoint | None:
        """The checkpoint from which the run goes on; None if it begins at its start."""
        return None if self._checkpoints is None else self._checkpoints.resumed

    def _ask_for_call(self, rank: int, number: int) -> None:
        """A worker calls `distribute` for the second time, or for a later one: let it say hello."""
        if self._begin_call is None or not 2 <= number <= len(self._calls) + 1:
            raise ProtocolError(f"the worker began call {number} of distribute after {len(self._calls)} calls")
        if number == len(self._calls) + 1:
            later = self._begin_call(self, number)
            later._open_within(self)
            self._calls.append(later)
        call = self._calls[number - 1]
        call._asked.add(rank)
        here = not self._hosts.has(rank)  # on another host the agent's sockets serve all calls
        sockets: Fields = {"control": call._control.address, "directory": str(call._directory)}
        self._links[rank].tell("call", sockets if here else None)

    def _open_within(self, first: Supervisor) -> None:
        """Begin a later call in the processes that the supervisor of the first one has started."""
        self._hosts = first._hosts
        self.children.update({rank: child for rank, child in first.children.items() if rank >= 0})
        self._directory = self._open.enter_context(scratch())
        self._control = Control(f"ipc://{self._directory / 'control'}", self._heartbeat)
        self._open.callback(self._control.close)

    def _may_release(self) -> bool:
        """Whether this is a later call whose nodes have been dismissed and have left."""
        servers = [child for address, child in self.children.items() if address < 0]
        over = self._number > 1 and self._over and all(child.exit_code() is not None for child in servers)
        return over and all(map(self._health.left, self.standings))

    def _release(self) -> None:
        """Close the sockets and files of a later call that has ended, and report its outcome."""
        if self._released:
            return
        self._released = True
        for link in list(self._links.values()):
            self._hear(link)  # its last messages
        self._open.close()
        self._links.clear()
        for address in [a for a, child in self.children.items() if a < 0 and not child.exit_code()]:
            del self.children[address]
        self._ended(self.outcome)
        self.forget()

    def _watch(self, result: Callable[[Outcome], FlatArray | None]) -> None:
        """Handle messages until every remaining node has sent its final parameters and has been dismissed.

        The processes of scripts may begin further calls of `distribute` until they end.

        Raises:
            RunError: a node failed, or was lost and the others cannot continue without it.
        """
        shown = 0.0
        while not all(one._over for one in self._calls) or not self._scripts_ended():
            self._poll()
            for one in list(self._calls):
                one._turn(result)
            self._look_for_change()
            if self.outcome.change is not None:
                return
            if time.monotonic() - shown > 0.25:
                shown = time.monotonic()
                self._show(self._current().standings)
                owner.check(self._record)
                self._look_for_requests()
        self._show(self._current().standings)

    def _look_for_change(self) -> None:
        """Let workers leave and join, once all nodes have stopped with their states."""
        if self._checkpoints is None or self._over or self._went is None or self.outcome.change is not None:
            return
        joiners = self._joiners()
        if not (self._leavers or joiners or self._renewing):
            return
        if not self._cutting and (joiners or self._leave_again is None or time.monotonic() >= self._leave_again):
            self._cutting = True
            self._checkpoints.cut()
        if self._cutting and self._checkpoints.is_cut:
            names = " and ".join(node_name(rank) for rank in sorted(self._leavers))
            left = f"{names} left, as SIGTERM asked" if names else self._renewing
            self._change(set(self._leavers), left, joiners)
        elif self._cutting and self._checkpoints.is_cut is False:
            self._cutting = False  # the run is about to end, a node was lost, or the disk is full
            self._could_not_change(self._checkpoints.why_not or "the nodes had continued")

    def _joiners(self) -> int:
        """Number of workers that can take part now, because their processes have built the job."""
        return self._joiners_here() + self._hosts.prepared

    def _joiners_here(self) -> int:
        """Those whose processes are on this machine."""
        try:
            return self.requests.workers if self.newcomers.ready() else 0
        except RunError as error:
            self._refuse_joiners(str(error))
            return 0

    def _refuse_joiners(self, why: str) -> None:
        self.newcomers.end()
        self.requests.refuse(f"no worker can join now: {why}")
        self._hosts.refuse_joiners(f"no worker can join now: {why}")

    def _could_not_change(self, why: str) -> None:
        """Let the workers that asked to leave try again later; after a loss that the run survives, they leave at once,
        as lost workers do, because there are no more checkpoints.
        """
        self._refuse_joiners(why)
        for rank in sorted(self._leavers):
            text = f"{node_name(rank)} did not leave, although SIGTERM asked it to: {why}"
            if self._missed:
                self._leave_as_lost(rank)
            elif text not in self.outcome.warnings:
                on_stderr(text)
                self.outcome.warnings.append(text)
        self._leavers -= self._condemned.keys()
        self._leave_again = time.monotonic() + LEAVE_AGAIN

    @property
    def _missed(self) -> set[Address]:
        """Lost nodes that no backup has replaced."""
        return self._gone - self.outcome.replaced

    def _leave_as_lost(self, rank: int) -> None:
        self._condemned[rank] = f"{node_name(rank)} left, as SIGTERM asked"

    def _change(self, gone: set[int], left: str, joined: int) -> None:
        """Continue without the workers that are gone, and with those that join; `left`: a clause about the former."""
        if joined > self._hosts.prepared:
            self.requests.admit()
        text = f"{joined} worker{'s' * (joined > 1)} joined" if joined else ""
        reason = ", and ".join(filter(None, (left, text)))
        self.outcome.change = Change(gone, reason, joined)

    def _look_for_requests(self) -> None:
        """Start the processes of workers that want to join the run."""
        if self._most is None or self._went is None or self._over or self._cutting:
            return
        try:
            if self.requests.take(lambda workers: self._why_not_joined_by(workers + self._hosts.joining)):
                self.newcomers.invite(self.requests.workers)
        except RunError as error:
            self._refuse_joiners(str(error))

    def _why_no_host_joins(self, workers: int) -> str:
        """Why this number of workers of another host cannot join now; empty if they can."""
        if self._most is None:
            return NONE_JOINS
        if self._went is None or self._over or self._cutting:
            return "no worker can join just now, because the run begins, ends or changes its workers; try again"
        return self._why_not_joined_by(workers + self._hosts.joining + self.requests.workers)

    def _let_leave(self, ranks: Collection[int]) -> bool:
        """Let workers leave because their host is stopped; return whether the run continues without them."""
        leavers = self._leavers | set(ranks)
        if self._least is None or self._checkpoints is None or self._went is None or self._over or self._missed:
            return False
        if self._why_not_with(len(self._view.ranks) - len(leavers)):
            return False
        self._leavers = leavers
        return True

    def _why_not_joined_by(self, workers: int) -> str:
        """Why this number of workers cannot join now; empty if they can."""
        if self._missed:
            return (
                f"no worker can join, because {node_name(min(self._missed))} was lost and no more checkpoints are taken"
            )
        if self._done:
            return "no worker can join, because a worker has taken its last step"
        total = len(self._view.ranks) - len(self._leavers) + workers
        if self._most is not None and total > self._most:
            return f"the number of workers must be <= --max-workers {self._most}, got {total}; let fewer workers join"
        why = self._why_not_with(total)
        return f"no {workers} workers can join: {why}" if why else ""

    def _asked_to_leave(self, address: Address) -> None:
        """A signal asks a worker to leave the run.

        Raises:
            KeyboardInterrupt: too few workers are left, so that the run ends.
        """
        if self._least is None or self._checkpoints is None or self._over or address in self._leavers:
            return
        if self._missed:  # a run with a loss has no checkpoint
            self._leave_as_lost(address)
            return
        if why := self._why_not_with(len(self._view.ranks) - len(self._leavers) - 1):
            raise KeyboardInterrupt(f"{node_name(address)} left, as SIGTERM asked, and {why}")
        self._leavers.add(address)

    def _why_not_with(self, workers: int) -> str:
        """Why the run cannot continue with this number of workers; empty if it can."""
        if self._least is not None and workers < self._least:
            return f"the {workers} workers left are fewer than --min-workers {self._least}"
        try:
            if self.outcome.strategy is not None:
                self.outcome.strategy.check(workers)
        except FlockstepError as error:
            return str(error)
        return ""

    def _goes_on_after(self, address: Address, reason: str) -> bool:
        """Whether the run goes back to its newest checkpoint after the loss of a server, or of a worker that its
        strategy needs.
        """
        newest = None if self._checkpoints is None else self._checkpoints.newest
        if newest is None or self._done:
            return False
        began = self._went is not None
        change = self.outcome.change  # of another node that was lost just now
        joined = change.joined if change is not None else self._joiners() if began else 0
        if address < 0:
            if change is not None:  # servers are started again anyway
                return True
            some_died = len(self._view.ranks) < self._workers
            if self._back_to is None or not began or some_died or min(newest.steps.values()) < self._back_to:
                return False
        elif self._fewer_end_the_run(joined):
            return False
        self._change(set(range(self._workers)) - set(self._view.ranks), reason, joined)
        return True

    def _fewer_end_the_run(self, joined: int) -> bool:
        """Whether the run does not go back to a checkpoint with the workers that are left and those that join.

        Before all nodes are ready, every strategy needs all workers.
        """
        strategy, began = self.outcome.strategy, self._went is not None
        survives = strategy is not None and strategy.traits.deaths(self._workers) >= len(self._missed)
        none_leaves = self._least is None and (began or not self._joining.issuperset(self._missed))
        if none_leaves or (survives and began):
            return True
        return bool(self._why_not_with(len(self._view.ranks) + joined))

    @property
    def _open_calls(self) -> list[Supervisor]:
        """The calls whose nodes may still send messages, the first one included."""
        return [one for one in self._calls if not one._released]

    def _current(self) -> Supervisor:
        """The supervisor of the first call whose run is not over; if all are, that of the last call."""
        return next((one for one in self._calls if not one._over), self._calls[-1])

    def _scripts_ended(self) -> bool:
        """Whether no process can begin a further call of `distribute`."""
        return self._begin_call is None or all(map(self._health.ended, range(self._workers)))

    def _turn(self, result: Callable[[Outcome], FlatArray | None]) -> None:
        """Look for lost and late nodes of this call, and dismiss its nodes once all have finished."""
        if self._over:
            if self._may_release():
                self._release()
            return
        self._look_after_children()
        self._wait_monitor.look(self._links.keys(), self._done | self._gone)
        self._evaluation.go_on()
        if not self._finished():
            if self._checkpoints is not None:
                with undisturbed():
                    self._checkpoints.look(self.standings)
            return
        assert self.outcome.strategy is not None
        for address in self._missed - self._done:  # the others may have finished too when this node was lost
            if address < 0 or not self.outcome.strategy.traits.survives:
                raise PeerLost(self.outcome.lost[address].reason)
        self._dismiss(result(self.outcome))
        self._over = True

    def _finished(self) -> bool:
        expected = set(self.standings) - self._gone
        if not any(address >= 0 for address in expected):
            raise RunError("every worker was lost: " + "; ".join(one.reason for one in self.outcome.lost.values()))
        return bool(self._ready) and expected <= self._done

    def _poll(self) -> None:
        """Handle the messages of all calls' nodes."""
        self._hosts.require_running()
        if self._wait(LAST_POLL if all(one._over for one in self._calls) else POLL):
            with undisturbed():  # half a message would look like a broken protocol
                for one in self._open_calls:
                    for words in one._heard():
                        self._accept_control(words)
                    for link in list(one._links.values()):
                        one._hear(link, TURN)

    def _wait(self, seconds: float) -> bool:
        """Wait up to `seconds` until something has arrived from a node, or from another host."""
        sources: list[Frames | Control] = [link.frames for one in self._calls for link in one._links.values()]
        sources += [one._control for one in self._open_calls[1:]]
        arrived = self._control.wait(sources, 0.0 if self._hosts.waiting else seconds, self._hosts.descriptors())
        with undisturbed():
            self._hosts.pump()
        return arrived or self._hosts.waiting

    def _heard(self) -> Iterator[bytes]:
        """Messages of processes that are not linked yet."""
        yield from self._control.heard()
        if self._number == 1:
            yield from self._hosts.heard()

    def frames(self, address: Address, endpoint: str, max_bytes: int) -> Frames:
        """Connect to a process on any host; `endpoint` is the address at which the process listens on its host."""
        if self._hosts.has(address) and (address >= 0 or self._number == 1):
            return self._hosts.frames(address, endpoint, max_bytes)
        return self._control.frames(endpoint, max_bytes)

    def _hear(self, link: ProcessLink, most: int = -1) -> None:
        """Handle the messages of a node that have arrived, at most `most` of them."""
        try:
            while most and (message := link.receive()) is not None:
                self._flight.note("receive", link.address, message.tag, self.standings[link.address].step)
                self._handle(message)
                most -= 1
        except ProtocolError as error:
            if link.address not in self._gone:
                self._lose(link.address, f"{node_name(link.address)} broke the protocol: {error}")

    def _accept_control(self, data: bytes) -> None:
        try:
            words = msgspec.msgpack.decode(data, type=Hello | Failure)
        except (ValueError, RecursionError):
            return  # A stranger on the control socket; it is ignored.
        for one in self._open_calls:
            if words.run == one._run and words.address in one.standings:
                if isinstance(words, Failure):
                    one._fail(words.address, words.kind, words.reason, words.trace)
                one._hello(words)

    def _hello(self, hello: Hello) -> None:
        if hello.address in self._links or hello.address in self._gone:  # a lost node may not return
            return
        if hello.protocol != PROTOCOL:
            raise ConfigurationError(
                f"{node_name(hello.address)} uses protocol {hello.protocol}, the launcher uses protocol "
                f"{PROTOCOL}; install the same flockstep for every worker"
            )
        self._check_hello(hello)
        link = self._links[hello.address] = ProcessLink(self.frames, hello)
        self._open.callback(link.close)
        link.tell("linked")
        self._start_servers()
        self._welcome()

    def _check_hello(self, hello: Hello) -> None:
        """Check that every node has the same model and strategy as the first node that joined."""
        if self.outcome.schema is None or self.outcome.strategy is None:
            self.outcome.schema, self.outcome.strategy = hello.schema, rule_of(hello.strategy)
            replicas = self._workers // self._parts
            self.outcome.strategy.check(replicas)
            self._cluster = whole_cluster(self.outcome.strategy.cluster(replicas), self._parts)
            self._program_events = ProgramEvents(self._cluster)
            return
        self.outcome.schema.require(hello.schema, node_name(hello.address))
        if rule_of(hello.strategy) != self.outcome.strategy:
            raise ConfigurationError(
                f"every worker must use the same strategy, got {hello.strategy} from {node_name(hello.address)} and "
                f"{self.outcome.strategy} from another worker; give every worker the same strategy"
            )

    def _start_servers(self) -> None:
        strategy = self.outcome.strategy
        if strategy is None or len([a for a in self._links if a >= 0]) < self._workers:
            return
        for address in self._cluster.processes[self._workers :]:
            if address not in self.standings:
                require_open_files(1, more=0)
                self.standings[address] = NodeProgress()
                self._keep_child(address, self._server(self._node_spec(address), self._links[0].hello))

    def _server(self, node_spec: NodeSpec, hello: Hello) -> Child | None:
        """Start a server or a backup, on this host or on another one; on this host in a later call."""
        index, cluster = -1 - self._cluster.logical(node_spec.address), self._cluster
        optimizer = str(from_data(hello.optimizer, Optimizer))  # type: ignore[type-abstract]
        group = None
        if self.outcome.sizes:
            servers = cluster.servers // self._parts
            group, index = groups_of(self.outcome.sizes, servers)[index // servers], index % servers
        spec = ServerSpec(index, hello.strategy, optimizer, hello.schema, self._every, self._imports, group)
        if self._number > 1 and all(map(self._hosts.has, range(self._workers))):
            raise ConfigurationError(
                f"a later call of distribute starts its servers on the coordinator's host, got {hello.strategy} and a "
                "coordinator without workers, whose host no worker can reach; use a strategy without servers in "
                "later calls"
            )
        turn = cluster.turn(node_spec.address)
        if self._number == 1 and self._hosts.place_server(node_spec.address, turn, cluster.beside):
            return self._hosts.start(node_spec, spec)
        return self._start_server(node_spec, spec)

    def _welcome(self) -> None:
        """When all nodes have joined, send each of them the addresses of the others."""
        strategy = self.outcome.strategy
        if strategy is None or len(self._links) < len(self._cluster.processes):
            return
        model = self._links[0].hello.schema.nbytes
        peers = {address: link.hello.bus for address, link in self._links.items()}
        if self._parts == 1:
            self._memory = self._transport.share(self._workers, model)
        places: dict[str, list[int]] = {}
        for rank in self._view.ranks:
            places.setdefault(self._links[rank].hello.host, []).append(rank)
        hosts = self.outcome.hosts = tuple(map(tuple, places.values()))
        memory, servers, replicas = self._memory, self._cluster.servers, self._cluster.replicas
        welcome = Welcome(self._view, hosts, servers, peers, "" if memory is None else memory.address, replicas)
        for address, link in self._links.items():
            link.tell("welcome", welcome)
            if self._initial is not None:
                link.tell("values", None, self._initial.of_node(address, servers // self._parts))

    def _be_ready(self, address: Address) -> None:
        """Begin the run when all nodes are ready."""
        self._ready.add(address)
        if len(self._ready) < len(self._links):
            return
        resumed = self._resumed()
        self.began = time.monotonic()
        went = self._went = self.began - (0.0 if resumed is None else resumed.manifest.seconds)
        if self._checkpoints is not None and self.outcome.strategy is not None:
            self._checkpoints.begin(self._links, self.outcome.strategy, self._cluster)
        self._wait_monitor.begin(bool(self.outcome.strategy and self.outcome.strategy.traits.results))
        self._memory = None
        # All are connected, so even a killed supervisor leaves no sockets behind.
        shutil.rmtree(self._directory, ignore_errors=True)
        self._hosts.begin()
        for link in self._links.values():
            self._begin(link, went)
        step = 0 if resumed is None else min(resumed.manifest.steps.values())
        text = f"the run continues with {self._workers} workers from step {step}"
        self.requests.confirm(text)
        self._hosts.confirm(text)

    def _handle(self, message: Message) -> None:
        address, note, heard = message.source, message.note, time.monotonic()
        match message.tag:
            case "clock":
                self._links[address].tell("clock", {"heard": heard, "answered": time.monotonic()})
            case "ready":
                self._be_ready(address)
            case "call":
                self._ask_for_call(address, int(note["number"]))
            case "communicator":
                self._communicators.hear(self._links[address], self._links, note, self.frames, self._directory)
            case "events" | "flight":
                self._keep(address, message)
            case "waiting":
                self._wait_monitor.hear(address, note)
            case "gradient" | "data":
                self._draws[message.tag].hear(address, note)
            case "snapshot":
                self._begin_snapshot(self._links[address], note)
            case "part":
                self._links[address].tell("taken")
                self._take(address, message.payload)
            case "done" | "left":
                self._leave(address, message.tag, int(note["step"]))
            case "checkpoint":
                self._hear_of_checkpoint(address, note)
            case "leave" | "quarantine":
                self._remove(address, note)
            case "failed":
                self._fail(address, str(note["kind"]), str(note["reason"]), str(note["trace"]))

    def _keep(self, address: Address, message: Message) -> None:
        """Write what a node reports: events of the record, or its flight recorder."""
        if message.tag == "flight":
            self._keep_flight(address, decoded(message.payload.data))
        else:
            self._write(address, events_in(message.payload))

    def _keep_flight(self, address: Address | None, events: list[FlightEvent]) -> None:
        """Append the events of a node's flight recorder, or of the launcher's, to its file."""
        if self._went is None or isinstance(self.outcome.error, Interrupted):  # an interruption is no fault
            return
        try:
            append(self._record, address, events)
        except OSError as error:
            text = f"the flight recorder was not written: {error.strerror}"
            if text not in self.outcome.warnings:
                self.outcome.warnings.append(text)

    def _keep_own_flight(self) -> None:
        """Append the launcher's flight recorder to its file, because of a fault."""
        went = self._went or 0.0
        self._keep_flight(None, self._flight.taken(lambda seconds: seconds - went))

    def _hear_of_checkpoint(self, address: Address, note: Fields) -> None:
        if self._checkpoints is not None:
            self._checkpoints.hear(address, note)
            return
        text = (
            "flockstep.checkpoint takes no checkpoints in this run, because flockstep launch has not started its "
            "processes from a script"
        )
        if text not in self.outcome.warnings:
            on_stderr(text)
            self.outcome.warnings.append(text)

    def _remove(self, address: Address, note: Fields) -> None:
        """A node asks to leave, or to put a worker in quarantine."""
        if note:
            self._condemn(address, int(note["address"]), str(note["reason"]))
        else:
            self._asked_to_leave(address)

    def _condemn(self, by: Address, worker: Address, reason: str) -> None:
        """Put a worker in quarantine, as a server or the worker itself asks."""
        if worker < 0 or 0 <= by != worker:
            raise ProtocolError(
                f"{node_name(by)} asks to put {node_name(worker)} in quarantine, but only a server or the worker "
                "itself may do that"
            )
        self._condemned[worker] = reason

    def _begin(self, link: ProcessLink, went: float) -> None:
        """All nodes were ready at `went`: tell this one to begin."""
        node, record = link.address, RunFolder(self._record)
        self._writers[node] = self._open.enter_context(EventWriter(record.node_events_file(node), MOST))
        self.outcome.nodes.add(node)
        self.standings[node].state = "running"
        link.tell("go", {"at": went})

    def _write(self, address: Address, events: list[Event]) -> None:
        """Write a node's events to the record."""
        writer = self._writers.get(address)
        if writer is None:
            raise ProtocolError("the process sent events before the run began")
        for kept in events:
            if (event := self._program_events.once(address, kept)) is None:
                continue
            writer.write(event)
            if isinstance(event, StepEvent):
                self.standings[address].progress(event)
            elif isinstance(event, NodeEvent):
                self._hashes[address] = event.hash
        writer.flush()
        if address >= 0 and any(isinstance(event, StepEvent) for event in events):
            self._wait_monitor.hear(address, {"step": self.standings[address].step})
            for one in self._calls:
                one._wait_monitor.note_sign(address)

    def _begin_snapshot(self, link: ProcessLink, note: Fields) -> None:
        with self._warned(float(note["tick"])):
            node = self._cluster.logical(link.address)
            self._arriving[link.address] = SnapshotWriter(self._places, node, note, link.hello.largest)
            self._take(link.address, np.empty(0, np.uint8))

    def _take(self, address: Address, part: FlatArray) -> None:
        """Handle a part of a snapshot; drop the snapshot if no folder accepts the part."""
        if (arriving := self._arriving.pop(address, None)) is None:
            return
        with self._warned(arriving.tick):
            if (item := arriving.add(part)) is None:
                self._arriving[address] = arriving
                return
            if item.tick is None or item.tick == LAST:
                self.outcome.newest.take(item)
            self._evaluation.take(item)

    @contextlib.contextmanager
    def _warned(self, tick: float) -> Iterator[None]:
        """Turn an error of storing a snapshot into a warning; only final parameters must be stored."""
        try:
            yield
        except RunError as error:
            if tick == FINAL:
                raise
            if str(error) not in self.outcome.warnings:
                self.outcome.warnings.append(str(error))

    def _leave(self, address: Address, how: str, step: int) -> None:
        """Handle a node whose program has ended, or that takes no more steps."""
        if how == "done":
            self._done.add(address)
            self.standings[address].state = "done"
            self.standings[address].step = step
        self._tell_others("left", address, {"address": address, "step": step})

    def _fail(self, address: Address, kind: str, reason: str, trace: str) -> NoReturn:
        self.standings[address].state = "failed"
        raise of_kind(kind, reason, f"In {node_name(address)}:\n{trace}" if trace else "")

    def _look_after_children(self) -> None:
        while self._condemned:
            address, reason = self._condemned.popitem()
            if address >= 0 and address in self._links and address not in self._done:
                self._hear(self._links[address])
                self._lose(address, reason)
        for address in list(self.standings):
            how = None if address in self._gone else self._health.gone(address)
            link = self._links.get(address)
            if how is not None and link is not None:
                self._hear(link)  # its last messages
            if how is not None and address not in self._gone:
                step = self.standings[address].step
                self._lose(address, f"{how} at about step {step}" if step else how)

    def _lose(self, address: Address, reason: str) -> None:
        """Handle the loss of a node; the other stages of a lost worker's replica end with it if the others go on."""
        if self._parts > 1 and address >= 0:
            replica, part = divmod(address, self._parts)
            reason = f"{reason}; it held stage {part} of replica {replica}"
            for other in range(replica * self._parts, (replica + 1) * self._parts):
                if other != address and other not in self._gone and self._survived:
                    why = f"{node_name(other)} ended with {node_name(address)}, a stage of the same replica"
                    self._lose_node(other, why, quiet=True)
        self._lose_node(address, reason)

    @property
    def _parts(self) -> int:
        """Number of workers that hold one replica together."""
        return max(1, len(self.outcome.sizes))

    @property
    def _survived(self) -> bool:
        """Whether the strategy continues without workers that are lost now."""
        strategy = self.outcome.strategy
        return self._went is not None and strategy is not None and bool(strategy.traits.survives)

    def _lose_node(self, address: Address, reason: str, quiet: bool = False) -> None:
        self._gone.add(address)
        if (child := self.children.get(address)) is not None:
            child.kill()
        if (link := self._links.pop(address, None)) is not None:
            link.close()  # the node may only have been stopped: messages that it sends later belong to no run
        since = time.monotonic() - self._went if self._went is not None else 0.0
        self.outcome.lost[address] = LostEvent(since, address, reason)
        if (arriving := self._arriving.pop(address, None)) is not None:
            arriving.drop()
        self.standings[address].state = "lost"
        if self._went is not None and self.outcome.change is None and is_replaced(self._cluster, address, self._gone):
            self._replace(address, reason)
            return
        self._evaluation.lose(self._cluster.logical(address))
        if self._went is None and child is not None:
            refuse_unguarded(child)
        self._view = self._view.without(address)
        goes_on = self._goes_on_after(address, reason)
        if self._went is None and not goes_on:
            raise PeerLost(f"{reason} before the run started")
        if self._checkpoints is not None:
            self._checkpoints.end() if goes_on else self._checkpoints.lose(address)
        if goes_on:
            return
        if self.outcome.change is not None:
            self.outcome.change = None
            raise PeerLost(reason)
        loss = self._losses[address] = NodeLost(address, reason, self._view)
        self._keep_own_flight()
        traits = None if self.outcome.strategy is None else self.outcome.strategy.traits
        survives = traits is not None and traits.survives and traits.results
        if address >= 0 and self._view.ranks and survives and not quiet:
            on_stderr(f"{reason}; {len(self._view.ranks)} of {self._workers} workers continue")
        self._tell_others("lost", address, loss)

    def _replace(self, address: Address, reason: str) -> None:
        """A process of a server is lost, and another one continues: tell all nodes."""
        self.outcome.replaced.add(address)
        found = replaced(self._cluster, address, self._gone, reason)
        if found.promoted is not None:
            self._done.discard(found.promoted)  # it has to send the result
        on_stderr(found.text)
        self.outcome.warnings.append(found.text)
        if self._checkpoints is not None:
            self._checkpoints.interrupt(f"{node_name(address)} was lost")
        if self._back_to is not None:
            self._renewing = found.text
        loss = self._losses[address] = NodeLost(address, reason, self._view, True)
        self._keep_own_flight()
        self._tell_others("lost", address, loss)

    def _tell_others(self, tag: str, address: Address, note: AnyNote) -> None:
        for other, link in self._links.items():
            if other != address:
                link.tell(tag, note)

    def _dismiss(self, result: FlatArray | None) -> None:
        """Tell all nodes that the run has ended.

        Send the resulting model to nodes that hold another, with the workers' final buffers.
        """
        buffers = {} if result is None else self.outcome.newest.buffers()
        known = None if result is None else fingerprint(result)
        for address, link in self._links.items():
            link.dismiss(None if address < 0 or self._hashes.get(address) == known else result, buffers)

    def _end_all(self) -> None:
        """After a failure, ask all processes to end, keep what they still send, and kill those that do not
        end in time.
        """
        error = self.outcome.error
        if error is not None:
            self._keep_own_flight()
            for one in self._calls:
                one._stop_all(error)
        patience = self._patience if error is None else GRACE
        deadline = None if patience is None else time.monotonic() + patience
        last = math.inf if deadline is None else deadline + 2 * GRACE
        while not all(one._health.ended(address) for one in self._calls for address in one.standings):
            if time.monotonic() > last:
                self._hosts.abandon()
            if deadline is not None and time.monotonic() > deadline:
                kill_all(self._processes())
                if all(child.exit_code() is not None for child in self._processes()):
                    break  # the others are not processes of this host: their links are closed
                deadline += 1.0
            self._collect(LAST_POLL)
        self._collect(0.0)
        if error is None and self._patience is None:
            self._check_exits()

    def _processes(self) -> list[Child]:
        """The processes of all calls' nodes."""
        return [*{id(child): child for one in self._calls for child in one.children.values()}.values()]

    def _stop_all(self, error: FlockstepError) -> None:
        """Ask connected processes to end, and kill those that are about to join."""
        refused = int(isinstance(error, ConfigurationError))
        for address, child in self.children.items():
            if address not in self._links and (self._number == 1 or address < 0 or address in self._asked):
                child.kill()
        for link in self._links.values():
            link.tell("stop", {"reason": str(error)[:2000], "refused": refused})

    def _collect(self, seconds: float) -> None:
        """Store what nodes send while the run ends, for about `seconds`."""
        if not (self._processes() or self._links) or not self._wait(seconds):
            return
        for one in self._open_calls:
            list(one._heard())  # no process can join any more
            for link in one._links.values():
                with contextlib.suppress(ProtocolError, RunError):
                    while (message := link.receive()) is not None:
                        if message.tag in ("events", "snapshot", "part", "done", "flight"):
                            one._handle(message)

    def _clean_up(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.end(failed=self.outcome.error is not None)
        reap(self._processes(), GRACE, self._hosts.pump)
        for one in self._open_calls[1:]:
            one.outcome.error = None if one._over else self.outcome.error
            try:
                one._release()
            except FlockstepError as error:
                self.outcome.error = self.outcome.error or error
        self._open.close()

    def _check_exits(self) -> None:
        for address, child in ((address, child) for one in self._calls for address, child in one.children.items()):
            code = child.exit_code()
            if code not in (0, None, ENDED) and not any(address in one._gone for one in self._calls):
                self.outcome.error = RunError(f"{node_name(address)} {how_it_ended(code)} after the run had ended")
