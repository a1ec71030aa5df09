"""Connects the processes of a run, watches them, and collects their events and models."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec

from flockstep.arrays.schema import FlatArray
from flockstep.communicator.joining import rule_of
from flockstep.errors import (
    ConfigurationError,
    FlockstepError,
    Interrupted,
    PeerLost,
    ProtocolError,
    RunError,
    in_short,
    of_kind,
)
from flockstep.expression import from_data
from flockstep.launchers.checkpoints import Checkpointer
from flockstep.launchers.children import ENDED, Child, how_it_ended, kill_all, reap, refuse_program_of
from flockstep.launchers.communicators import Communicators
from flockstep.launchers.comparisons import Comparisons
from flockstep.launchers.evaluation import SnapshotHandler
from flockstep.launchers.gathering import HEARTBEAT, link_timeout_of
from flockstep.launchers.host_messages import ServerSpec
from flockstep.launchers.hosts import OtherHosts
from flockstep.launchers.initial_parts import InitialParts
from flockstep.launchers.join_requests import JoinRequest, JoinRequests
from flockstep.launchers.link import ProcessLink
from flockstep.launchers.newcomers import Newcomers
from flockstep.launchers.node_changes import Members, NodeChanges
from flockstep.launchers.node_records import NodeRecords
from flockstep.launchers.open_files import require_open_files
from flockstep.launchers.peers import Change, Outcome, RunPeer, RunPeers, successor
from flockstep.launchers.signals import undisturbed
from flockstep.launchers.wait_monitor import JOINS_JOB, JOINS_SCRIPT, WaitMonitor, on_stderr
from flockstep.links.control import Control, Frames
from flockstep.links.kinds import Transport
from flockstep.links.shared_memory import SharedMemory
from flockstep.links.wire import PROTOCOL
from flockstep.messages import Address, AnyNote, Fields, Message, node_name
from flockstep.nodes import Cluster
from flockstep.optimizers.base import Optimizer
from flockstep.records import owner
from flockstep.records.checkpoints import Checkpoint
from flockstep.records.config import RunConfig
from flockstep.records.events import Event, LostEvent, StepEvent
from flockstep.records.failpoints import reach
from flockstep.records.flight import decoded
from flockstep.records.scratch import scratch
from flockstep.runtime.member import AGAIN, WINDOW, Failure, Hello, NodeLost, NodeSpec, Welcome, run_of_call
from flockstep.runtime.node_metrics import fingerprint
from flockstep.runtime.part_group import groups_of
from flockstep.runtime.plan import whole_cluster
from flockstep.runtime.replication import ProgramEvents
from flockstep.runtime.reports import events_in
from flockstep.runtime.snapshot_tracker import NewestSnapshots

GRACE = 3.0
"""Seconds that processes have to end by themselves after a failure, before they are killed."""
LAST_CODE = 15.0
"""Seconds that processes have after a failure if a script has ended without `finish()`; an interpreter with PyTorch
takes several seconds to end on a busy machine.
"""
TURN = 4 * WINDOW
"""Maximum number of messages of one node that are handled before those of the next node, so that no node can block the
others.
"""
LAST_CHECKPOINT = 10.0
"""Maximum number of seconds for the checkpoint that is taken when a signal stops the run."""
LAST_POLL = 0.005
"""Seconds between two polls of processes that are about to end."""
POLL = 0.05
"""Seconds between two polls of the processes."""
MOMENT = 0.1
"""Seconds after a loss within which the deaths of other nodes belong to the same change of the nodes: a host or a user
who kills several processes does not kill them in one instruction.
"""


@dataclass(frozen=True)
class Starters:
    """Who starts the processes of a run; each returns the process, or None if something else starts it."""

    worker: Callable[[NodeSpec], Child | None]
    server: Callable[[NodeSpec, ServerSpec], Child | None]
    hosts: OtherHosts = field(default_factory=OtherHosts)
    """Starts the processes of other hosts."""


@dataclass(frozen=True)
class RunOfJob:
    """What the workers of a declared job run; their processes end soon after a successful run."""

    every: int = 0
    """Number of steps of each worker between two snapshots of a server; 0 for none."""
    parts: InitialParts | None = None
    """The parts of a split model; None if every worker holds a whole replica."""


@dataclass(frozen=True)
class RunOfScript:
    """What the workers of a launched run run: a script, which may go on after the run, must exit with code 0, and may
    call `distribute` again.
    """

    begin_call: Callable[[Supervisor, int], Supervisor]
    """Creates the supervisor of a later call, from that of the first call and the number of the call, from 2."""
    within: Supervisor | None = None
    """Supervisor of the first call, if this is a later one."""
    ended: Callable[[Outcome], None] = lambda outcome: None
    """Receives the outcome of a later call once its nodes have left, or the whole run has ended."""
    unjoined: str = ""
    """Clause about a script that ends without joining the run."""


class Supervisor:
    """Supervises one run of workers and the servers that their strategy needs."""

    _lost_at = -math.inf
    """Time of the last loss of a node, in seconds of the monotonic clock."""
    _released = False
    """Whether a later call has ended, and its sockets and files are closed."""
    _memory: SharedMemory | None = None
    """Segment of the workers, until all of them have attached to it."""
    _cluster = Cluster(0)
    """The nodes of the run; none until the strategy is known."""
    began: float | None = None
    """Time at which all nodes were ready, in seconds of the monotonic clock."""

    def __init__(
        self,
        config: RunConfig,
        record: Path,
        starters: Starters,
        program: RunOfJob | RunOfScript,
        show: Callable[[dict[Address, RunPeer]], None] = lambda peers: None,
        evaluation: SnapshotHandler | None = None,
        checkpoints: Checkpointer | None = None,
        members: Members | None = None,
    ):
        """`record`: the run's folder. `show` is called from time to time with the state of every process. `evaluation`
        receives the snapshots that nodes send. `checkpoints` takes the run's checkpoints, and knows where the run
        begins. `members`: how the workers have changed so far, and who joins.
        """
        self._config, self._record, self._starters, self._program = config, record, starters, program
        self._workers, self._transport = config.workers, Transport.parse(config.transport or "shared_memory")
        self._heartbeat, self._hosts = config.heartbeat or HEARTBEAT, starters.hosts
        script = program if isinstance(program, RunOfScript) else None
        self._script, self._initial = script, program.parts if isinstance(program, RunOfJob) else None
        sizes = () if self._initial is None else self._initial.sizes
        self.outcome = Outcome(config.workers, sizes=sizes, newest=NewestSnapshots(max(1, len(sizes))))
        self.members = members or Members(JoinRequests(record), Newcomers())
        unjoined = "" if script is None else script.unjoined
        self.peers = RunPeers(config.workers, self._heartbeat, self.members.epoch, unjoined)
        self._show, self._checkpoints = show, checkpoints
        self._changes = NodeChanges(self.peers, self.outcome, config, checkpoints, self._hosts, self.members)
        within = None if script is None else script.within
        self._calls: list[Supervisor] = [self] if within is None else within._calls
        """Supervisors of the calls of `distribute` that the scripts have begun; the first one watches the processes."""
        self._number = 1 if within is None else len(self._calls) + 1
        self._run: str = secrets.token_hex(8) if within is None else run_of_call(within._run, self._number)
        self._secret: bytes = secrets.token_bytes(32) if within is None else within._secret
        self._evaluation = evaluation or SnapshotHandler()
        self._records = NodeRecords(self.peers, self.outcome, record, self._evaluation)
        self._directory, self._open = Path(), contextlib.ExitStack()
        joins = JOINS_JOB if script is None else JOINS_SCRIPT
        interruption = 0.0 if self._hosts.here else 2 * link_timeout_of(config)
        self._wait_monitor = WaitMonitor(config.workers, config.step_timeout, joins=joins, interruption=interruption)
        self._communicators = Communicators(self.peers)
        self._comparisons = Comparisons(config.workers, lambda: self.outcome.strategy)

    def run(self, result: Callable[[Outcome], FlatArray | None] = lambda outcome: None) -> Outcome:
        """Start the processes, wait for the end, and tell the nodes that the run has ended.

        `result` selects the model that the nodes receive. Errors of the run are never raised, but stored in
        `outcome.error`.
        """
        try:
            self._start()
            self._watch(result)
            if self.outcome.change is not None:
                self._change_nodes(self.outcome.change)
                return self.outcome
            reach("run.ended")
        except FlockstepError as error:
            if isinstance(error, PeerLost):
                error.args = (f"{error}{self._resumable()}",)
            self.outcome.error = error
        except KeyboardInterrupt as stop:
            where = self._last_checkpoint()
            begun = self.peers.went is not None
            kept = "everything computed so far is in the record" if begun else "no worker had begun to train"
            self.outcome.error = Interrupted(f"{str(stop) or 'interrupted'}; {kept}{where}")
        except Exception as error:  # noqa: BLE001 - of the system: no folder for the sockets, no more processes, …
            self.outcome.error = RunError(f"the run could not be supervised: {in_short(error)}")
            self.outcome.error.__cause__ = error
        try:
            self._end_all(self.outcome.error)
        except KeyboardInterrupt:  # a second request to end
            kill_all(self._processes())
            why = self.outcome.error = self.outcome.error or Interrupted("interrupted after the run had ended")
            self._hosts.close(str(why), why.exit_code)
        if self._hosts.rejected:
            many = f"{self._hosts.rejected} connections to the coordinator's port were rejected"
            self.outcome.warnings.append(many)
        self._clean_up()
        self._changes.refuse_joiners("the run ended before the workers joined it")
        return self.outcome

    def reaches(self, rank: int) -> bool:
        """Return whether the process of a worker is connected, so that it can continue in the run."""
        return self.peers[rank].link is not None

    def begin_again(self, rank: int, node_spec: NodeSpec, config: str) -> Child:
        """Give the process of a worker the node specification with which it continues; return the process."""
        self._link(rank).tell(AGAIN, {"spec": msgspec.json.encode(node_spec).decode(), "config": config, "wait": 0})
        child, self.peers[rank].child = self.peers[rank].child, None
        assert child is not None
        return child

    def _link(self, address: Address) -> ProcessLink:
        """The connection of a process that has joined."""
        link = self.peers[address].link
        assert link is not None
        return link

    def _change_nodes(self, change: Change) -> None:
        """End the scripts, which begin again with other workers, or let the workers of a job wait for this."""
        if self._script is not None:
            self._end_all(Interrupted(f"the script begins again with other workers: {change.reason}"))
            self._clean_up()
            return
        for address, one in self.peers.items():  # the workers that stay wait until the run continues; all others end
            if one.link is not None:
                stays = address >= 0 and address not in change.gone
                one.link.tell(AGAIN, {"spec": "", "config": "", "wait": int(stays)})
            elif one.child is not None:
                one.child.kill()

    def close(self) -> None:
        """End the remaining processes of a run that continues with other workers, and close the connections."""
        kill_all(self._processes())
        self._clean_up()

    def _last_checkpoint(self) -> str:
        """Take a checkpoint, because a signal ends the run; return where the run goes on, for a sentence."""
        if self._checkpoints is None or self._checkpoints.unused:
            return ""
        self._changes.end()
        why, kept = self._why_no_checkpoint(self._checkpoints), self._checkpoints.newest
        if kept is None and self.peers.went is None:
            return ""
        missing = f"; no checkpoint was taken at the end, because {why}" if why else ""
        if kept is None:
            return missing
        return f"{missing}{self._resumable()}, the step of the previous checkpoint" if why else self._resumable()

    def _resumable(self) -> str:
        """The command that continues the run from its newest checkpoint, for a sentence; nothing if there is none."""
        kept = None if self._checkpoints is None else self._checkpoints.newest
        if kept is None:
            return ""
        return f"; flockstep resume {self._record} continues from step {min(kept.steps.values())}"

    def _why_no_checkpoint(self, checkpoints: Checkpointer) -> str:
        """Take a checkpoint, because a signal ends the run; return why there is none, and nothing if there is one."""
        began = time.monotonic()
        if self.peers.went is None:
            return "training had not begun"
        try:
            if self._finished():
                return "all workers had taken their last step"
            checkpoints.stop()
            stop = self._time_to_stop(began - self.peers.went)
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
        return min(max(5 * seconds / max(self.peers.least_step, 1), 1.0), LAST_CHECKPOINT)

    def forget(self) -> None:
        """Remove the snapshots that the nodes have sent so far."""
        self.outcome.newest = NewestSnapshots()
        shutil.rmtree(self._records.snapshots, ignore_errors=True)

    @property
    def failed_later(self) -> bool:
        """Whether the run failed in a later call to `distribute`, after the first call's run had succeeded."""
        return self.peers.over and not all(one.peers.over for one in self._calls)

    def _start(self) -> None:
        self._directory = self._open.enter_context(scratch())
        self._open.callback(self._transport.clean_up, self._directory)
        self._transport.prepare(self._directory)
        self._control = Control(f"ipc://{self._directory / 'control'}", self._heartbeat)
        self._open.callback(self._control.close)
        if self._config.max_workers is not None:
            self._open.enter_context(self.members.requests.open(self._control.address))
        self._hosts.why_not_join, self._hosts.let_leave = self._changes.why_no_host_joins, self._changes.let_leave
        self._hosts.meet()
        for rank in range(self._workers):
            self.peers[rank].child = self._starters.worker(self._node_spec(rank))

    def _node_spec(self, address: Address) -> NodeSpec:
        config = self._config
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
            seed=config.seed,
            strategy=config.strategy if self._script is not None and config.strategy_given else "",
            imports=config.imports,
            bad_gradients=config.bad_gradients,
            secret=self._secret.hex(),
            call=self._number,
            link_timeout=link_timeout_of(config),
            facts=None if self._initial is None else self._initial.facts,
            checkpoint="" if (resumed := self._resumed()) is None else str(resumed.folder.absolute()),
        )

    def _resumed(self) -> Checkpoint | None:
        """The checkpoint from which the run goes on; None if it begins at its start."""
        return None if self._checkpoints is None else self._checkpoints.resumed

    def _ask_for_call(self, rank: int, number: int) -> None:
        """A worker calls `distribute` for the second time, or for a later one: let it say hello."""
        if self._script is None or not 2 <= number <= len(self._calls) + 1:
            raise ProtocolError(f"a worker began call {number} of distribute, but call {len(self._calls) + 1} is next")
        if number == len(self._calls) + 1:
            later = self._script.begin_call(self, number)
            later._open_within(self)
            self._calls.append(later)
        call = self._calls[number - 1]
        call.peers[rank].asked = True
        here = not self._hosts.has(rank)  # on another host the agent's folder serves all calls
        self._link(rank).tell("call", {"directory": str(call._directory)} if here else None)

    def _open_within(self, first: Supervisor) -> None:
        """Begin a later call in the processes that the supervisor of the first one has started."""
        self._hosts = first._hosts
        for rank in range(self._workers):
            self.peers[rank].child = first.peers[rank].child
        self._directory, self._control = self._open.enter_context(scratch()), first._control

    def _may_release(self) -> bool:
        """Whether this is a later call whose nodes have been dismissed and have left."""
        servers = [child for address, child in self.peers.children.items() if address < 0]
        over = self._number > 1 and self.peers.over and all(child.exit_code() is not None for child in servers)
        return over and all(map(self.peers.left, self.peers))

    def _release(self) -> None:
        """Close the sockets and files of a later call that has ended, and report its outcome."""
        if self._released:
            return
        self._released = True
        for link in self.peers.links.values():
            self._hear(link)  # its last messages
        self._open.close()
        for address, one in self.peers.items():
            one.link = None
            if address < 0 and one.child is not None and not one.child.exit_code():
                one.child = None
        assert self._script is not None
        self._script.ended(self.outcome)
        self.forget()

    def _watch(self, result: Callable[[Outcome], FlatArray | None]) -> None:
        """Handle messages until every remaining node has sent its final parameters and has been dismissed.

        The processes of scripts may begin further calls of `distribute` until they end.

        Raises:
            RunError: a node failed, or was lost and the others cannot continue without it.
        """
        shown = 0.0
        while not all(one.peers.over for one in self._calls) or not self._scripts_ended():
            self._poll()
            with undisturbed():  # half a message would look like a broken protocol
                for one in list(self._calls):
                    one._turn(result)
                self._changes.look()
            if self.outcome.change is not None and self._all_losses_known():
                return
            if time.monotonic() - shown > 0.25:
                shown = time.monotonic()
                self._show(self._current().peers)
                owner.check(self._record)
                self._changes.look_for_requests()
        self._show(self._current().peers)

    def _all_losses_known(self) -> bool:
        """Whether no further node has died at the moment of the last loss: a change of the nodes includes all deaths of
        one moment.
        """
        settled = time.monotonic() - self._lost_at >= MOMENT
        return settled and not self.peers.dying()

    @property
    def _open_calls(self) -> list[Supervisor]:
        """The calls whose nodes may still send messages, the first one included."""
        return [one for one in self._calls if not one._released]

    def _current(self) -> Supervisor:
        """The supervisor of the first call whose run is not over; if all are, that of the last call."""
        return next((one for one in self._calls if not one.peers.over), self._calls[-1])

    def _scripts_ended(self) -> bool:
        """Whether no process can begin a further call to `distribute`."""
        return self._script is None or all(map(self.peers.ended, range(self._workers)))

    def _turn(self, result: Callable[[Outcome], FlatArray | None]) -> None:
        """Look for lost and late nodes of this call, and dismiss its nodes once all have finished."""
        if self.peers.over:
            if self._may_release():
                self._release()
            return
        self._look_after_children()
        if self.outcome.change is not None:  # of nodes that were lost just now
            return
        gone = self.peers.gone
        self._wait_monitor.look(self.peers.links, self.peers.done | gone, gone)
        self._evaluation.go_on()
        self._tell_early_ends()
        if not self._finished():
            if self._checkpoints is not None:
                with undisturbed():
                    self._checkpoints.look(self.peers.least_step)
            return
        assert self.outcome.strategy is not None
        for address in self.peers.missed - self.peers.done:  # the others may have finished too when this node was lost
            if address < 0 or not self.outcome.strategy.traits.survives:
                raise PeerLost(self.outcome.lost[address].reason)
        self._lose_early_ends()
        self._dismiss(result(self.outcome))
        self.peers.over = True

    def _finished(self) -> bool:
        expected = {address: one for address, one in self.peers.items() if not one.gone}
        if not any(address >= 0 for address in expected):
            raise PeerLost("every worker was lost: " + "; ".join(one.reason for one in self.outcome.lost.values()))
        return any(one.ready for one in self.peers.values()) and all(one.done for one in expected.values())

    def _poll(self) -> None:
        """Handle the messages of all calls' nodes."""
        self._hosts.require_running()
        if self._wait(LAST_POLL if all(one.peers.over for one in self._calls) else POLL):
            with undisturbed():  # half a message would look like a broken protocol
                for words, frames in self._heard():
                    self._accept(words, frames)
                for one in self._open_calls:
                    for link in one.peers.links.values():
                        one._hear(link, TURN)

    def _wait(self, seconds: float) -> bool:
        """Wait up to `seconds` until something has arrived from a node, or from another host."""
        links = [link for one in self._calls for link in one.peers.links.values()]
        sources = [one.frames for link in links for one in (link, link.beside) if one is not None]
        arrived = self._control.wait(sources, 0.0 if self._hosts.waiting else seconds, self._hosts.descriptors())
        with undisturbed():
            Control.flush(sources)
            self._hosts.pump()
        return arrived or self._hosts.waiting

    def _heard(self) -> Iterator[tuple[bytes, Frames]]:
        """The first messages of processes that have connected, on this host or on another one."""
        yield from self._control.heard()
        yield from self._hosts.heard()

    def _hear(self, link: ProcessLink, most: int = -1) -> None:
        """Handle the messages of a node that have arrived, at most `most` of them."""
        try:
            while most and (message := link.receive()) is not None:
                self._records.flight.note("receive", link.address, message.tag, self.peers[link.address].step)
                self._handle(message)
                most -= 1
        except ProtocolError as error:
            if not self.peers[link.address].gone:
                self._lose(link.address, f"{node_name(link.address)} broke the protocol: {error}")

    def _accept(self, data: bytes, frames: Frames) -> None:
        """Let a process in that has said which one it is; close the connection of any other."""
        words, joined = None, False
        with contextlib.suppress(ValueError, RecursionError):
            words = msgspec.msgpack.decode(data, type=Hello | Failure | JoinRequest)
        if isinstance(words, JoinRequest):
            self.members.requests.hear(words, frames)
            return
        for one in self._open_calls:
            if words is not None and words.run == one._run and words.address in one.peers:
                if isinstance(words, Failure):
                    frames.close()
                    one._fail(words.address, words.kind, words.reason, words.trace)
                joined |= one._hello(words, frames)
        if not joined:
            frames.close()

    def _hello(self, hello: Hello, frames: Frames) -> bool:
        """Link a process; return whether it may join."""
        peer = self.peers[hello.address]
        if hello.beside:
            if peer.link is not None:
                self._communicators.add(hello, frames, peer.link)
            return peer.link is not None
        if peer.link is not None or peer.gone:  # a lost node may not return
            return False
        try:
            self._check_hello(hello)
        except ConfigurationError:
            frames.close()
            raise
        peer.link = ProcessLink(frames, hello)
        self._open.callback(peer.link.close)
        self._start_servers()
        self._welcome()
        return True

    def _check_hello(self, hello: Hello) -> None:
        """Check that every node has the same version, model and strategy as the first node that joined."""
        if hello.protocol != PROTOCOL:
            raise ConfigurationError(
                f"{node_name(hello.address)} uses protocol {hello.protocol}, the launcher uses protocol "
                f"{PROTOCOL}; install the same version of flockstep for every worker"
            )
        if self.outcome.schema is None or self.outcome.strategy is None:
            self.outcome.schema, self.outcome.strategy = hello.schema, rule_of(hello.strategy)
            replicas = self._workers // self._parts
            self.outcome.strategy.check(replicas)
            if self._script is not None:
                self._changes.require_possible(self.outcome.strategy)
            self._cluster = whole_cluster(self.outcome.strategy.cluster(replicas), self._parts)
            self._records.program_events = ProgramEvents(self._cluster)
            return
        self.outcome.schema.require(hello.schema, node_name(hello.address))
        if rule_of(hello.strategy) != self.outcome.strategy:
            raise ConfigurationError(
                f"every worker must use the same strategy, got {hello.strategy} from {node_name(hello.address)} and "
                f"{self.outcome.strategy} from another worker; give every worker the same strategy"
            )

    def _start_servers(self) -> None:
        strategy = self.outcome.strategy
        if strategy is None or any(self.peers[rank].link is None for rank in range(self._workers)):
            return
        for address in self._cluster.processes[self._workers :]:
            if address not in self.peers:
                require_open_files(1, more=0)
                self.peers[address] = RunPeer()
                self.peers[address].child = self._server(self._node_spec(address), self._link(0).hello)

    def _server(self, node_spec: NodeSpec, hello: Hello) -> Child | None:
        """Start a server or a backup, on this host or on another one; on this host in a later call."""
        index, cluster = -1 - self._cluster.logical(node_spec.address), self._cluster
        optimizer = str(from_data(hello.optimizer, Optimizer))  # type: ignore[type-abstract]
        group = None
        if self.outcome.sizes:
            servers = cluster.servers // self._parts
            group, index = groups_of(self.outcome.sizes, servers)[index // servers], index % servers
        every = self._program.every if isinstance(self._program, RunOfJob) else 0
        spec = ServerSpec(index, hello.strategy, optimizer, hello.schema, every, self._config.imports, group)
        if self._number > 1 and all(map(self._hosts.has, range(self._workers))):
            raise ConfigurationError(
                f"a later call of distribute starts its servers on the coordinator's host, got {hello.strategy} and a "
                "coordinator without workers, whose host no worker can reach; use a strategy without servers in "
                "later calls"
            )
        turn = cluster.turn(node_spec.address)
        if self._number == 1 and self._hosts.place_server(node_spec.address, turn, cluster.beside):
            return self._hosts.start(node_spec, spec)
        return self._starters.server(node_spec, spec)

    def _welcome(self) -> None:
        """When all nodes have joined, send each of them the addresses of the others."""
        strategy, links = self.outcome.strategy, self.peers.links
        if strategy is None or len(links) < len(self._cluster.processes):
            return
        reach("meeting.begun")
        model = links[0].hello.schema.nbytes
        peers = {address: link.hello.bus for address, link in links.items()}
        if self._parts == 1:
            self._memory = self._transport.share(self._workers, model)
        places: dict[str, list[int]] = {}
        for rank in self.peers.view.ranks:
            places.setdefault(links[rank].hello.host, []).append(rank)
        hosts = self.outcome.hosts = tuple(map(tuple, places.values()))
        memory, servers, replicas = self._memory, self._cluster.servers, self._cluster.replicas
        welcome = Welcome(self.peers.view, hosts, servers, peers, "" if memory is None else memory.address, replicas)
        for address, link in links.items():
            link.tell("welcome", welcome)
            if self._initial is not None:
                link.tell("values", None, self._initial.of_node(address, servers // self._parts))

    def _be_ready(self, address: Address) -> None:
        """Begin the run when all nodes are ready."""
        self.peers[address].ready = True
        if not all(one.ready or one.gone for one in self.peers.values()):
            return
        resumed = self._resumed()
        self.began = time.monotonic()
        went = self.peers.went = self.began - (0.0 if resumed is None else resumed.manifest.seconds)
        if self._checkpoints is not None and self.outcome.strategy is not None:
            self._checkpoints.begin(self.peers, self.outcome.strategy, self._cluster)
        self._wait_monitor.begin(bool(self.outcome.strategy and self.outcome.strategy.traits.results))
        self._memory = None
        # A script may open sockets of a communicator in the folder later, and joiners send their requests there.
        if self._script is None and self._config.max_workers is None:
            # All are connected, so even a killed supervisor leaves no sockets behind.
            shutil.rmtree(self._directory, ignore_errors=True)
        self._hosts.begin()
        for link in self.peers.links.values():
            self._begin(link, went)
        step = 0 if resumed is None else min(resumed.manifest.steps.values())
        text = f"the run continues with {self._workers} workers from step {step}"
        self.members.requests.confirm(text)
        self._hosts.confirm(text)

    def _handle(self, message: Message) -> None:
        address, note, heard = message.source, message.note, time.monotonic()
        match message.tag:
            case "clock":
                self._link(address).tell("clock", {"heard": heard, "answered": time.monotonic()})
            case "ready":
                self._be_ready(address)
            case "call":
                self._ask_for_call(address, int(note["number"]))
            case "communicator":
                self._communicators.meet(address, self._directory)
            case "events" | "flight":
                self._keep(address, message)
            case "waiting":
                self._wait_monitor.hear(address, note)
            case "gradient" | "data" | "settings":
                self._comparisons.hear(message)
            case "snapshot":
                node, largest = self._cluster.logical(address), self._link(address).hello.largest
                self._records.begin_snapshot(address, node, note, largest)
            case "part":
                self._link(address).tell("taken")
                self._records.take(address, message.payload)
            case "unfinished" | "done" | "left":
                self._leave(address, message.tag, int(note["step"]))
            case "checkpoint":
                self._hear_of_checkpoint(address, note)
            case "leave" | "quarantine":
                self._remove(address, note)
            case "failed":
                self._fail(address, str(note["kind"]), str(note["reason"]), str(note["trace"]))

    def _hear_of_checkpoint(self, address: Address, note: Fields) -> None:
        if self._checkpoints is not None:
            self._checkpoints.hear(address, note)
            return
        text = (
            "flockstep.checkpoint takes no checkpoints in this run, because flockstep launch has not started its "
            "processes from a script"
        )
        self.outcome.warn(text, on_stderr)

    def _remove(self, address: Address, note: Fields) -> None:
        """A node asks to leave, or to put a worker in quarantine."""
        if note:
            self._condemn(address, int(note["address"]), str(note["reason"]))
        else:
            self._changes.ask_to_leave(address)

    def _condemn(self, by: Address, worker: Address, reason: str) -> None:
        """Put a worker in quarantine, as a server or the worker itself asks."""
        if worker < 0 or 0 <= by != worker:
            raise ProtocolError(
                f"{node_name(by)} asks to put {node_name(worker)} in quarantine, but only a server or the worker "
                "itself may do that"
            )
        self.peers[worker].condemned = reason

    def _begin(self, link: ProcessLink, went: float) -> None:
        """All nodes were ready at `went`: tell this one to begin."""
        self._records.begin(link.address, self._open)
        self.peers[link.address].state = "running"
        link.tell("go", {"at": went})

    def _keep(self, address: Address, message: Message) -> None:
        """Write what a node reports: events of the record, or its flight recorder."""
        if message.tag == "flight":
            self._records.keep_flight(address, decoded(message.payload.data))
        else:
            self._write(address, events_in(message.payload))

    def _write(self, address: Address, events: list[Event]) -> None:
        """Write a node's events to the record; a worker's steps show that it does not wait."""
        self._records.write(address, events)
        if address >= 0 and any(isinstance(event, StepEvent) for event in events):
            self._wait_monitor.hear(address, {"step": self.peers[address].step})
            for one in self._calls:
                one._wait_monitor.note_sign(address)

    def _leave(self, address: Address, how: str, step: int) -> None:
        """Handle a node whose script or program has ended, or that takes no more steps."""
        if how == "unfinished":
            self.peers[address].unfinished = step
            return
        if how == "done":
            one = self.peers[address]
            one.done, one.state, one.step = True, "done", step
        self._tell_others("left", address, {"address": address, "step": step, "how": self._how_left(address, step)})

    def _how_left(self, address: Address, step: int) -> str:
        if self.peers[address].unfinished is not None:
            return f"the script of {node_name(address)} ended after step {step} without optimizer.finish()"
        return f"{node_name(address)} left after step {step}"

    def _tell_early_ends(self) -> None:
        """Say once of every script that has ended without `finish()` that another worker has taken more steps. If the
        strategy needs all workers, the other worker says so when it ends the run.
        """
        if not self._survived:
            return
        first = max(range(self._workers), key=lambda rank: self.peers[rank].step)
        for rank, one in self.peers.items():
            if one.unfinished is not None and one.unfinished < self.peers[first].step and not one.early:
                one.early = f"{self._how_left(rank, one.unfinished)}, and {node_name(first)} went on"
                self.outcome.warn(one.early, on_stderr)

    def _lose_early_ends(self) -> None:
        """Count the scripts that ended early as lost, so that the result of the run is that of the other workers."""
        if all(one.unfinished is not None for rank, one in self.peers.items() if rank >= 0 and one.done):
            return  # no script calls finish(), so that an early end may be meant
        assert self.peers.went is not None
        for rank, one in self.peers.items():
            if one.early:
                self.outcome.lost[rank] = LostEvent(time.monotonic() - self.peers.went, rank, one.early)

    def _fail(self, address: Address, kind: str, reason: str, trace: str) -> NoReturn:
        self.peers[address].state = "failed"
        raise of_kind(kind, reason, f"In {node_name(address)}:\n{trace}" if trace else "")

    def _look_after_children(self) -> None:
        for address, one in list(self.peers.items()):
            reason, one.condemned = one.condemned, ""
            if reason and one.link is not None and not one.done:
                self._hear(one.link)
                self._lose(address, reason)
            how = None if one.gone else self.peers.how_lost(address)
            if how is not None and one.link is not None:
                self._hear(one.link)  # its last messages
            if how is not None and not one.gone:
                self._lose(address, f"{how} at about step {one.step}" if one.step else how)

    def _lose(self, address: Address, reason: str) -> None:
        """Handle the loss of a node; the other workers of a lost worker's replica end with it if the others go on."""
        if self._parts > 1 and address >= 0:
            replica, part = divmod(address, self._parts)
            assert self._initial is not None
            reason = f"{reason}; it held {self._initial.partition.part_name(part)} of replica {replica}"
            for other in range(replica * self._parts, (replica + 1) * self._parts):
                if other != address and not self.peers[other].gone and self._survived:
                    why = f"{node_name(other)} ended with {node_name(address)}, a worker of the same replica"
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
        return self.peers.went is not None and strategy is not None and bool(strategy.traits.survives)

    def _lose_node(self, address: Address, reason: str, quiet: bool = False) -> None:
        one, peers = self.peers[address], self.peers
        one.gone, one.state, self._lost_at = True, "lost", time.monotonic()
        if one.child is not None:
            one.child.kill()
        if one.link is not None:
            one.link.close()  # the node may only have been stopped: messages that it sends later belong to no run
            one.link = None
        since = time.monotonic() - peers.went if peers.went is not None else 0.0
        self.outcome.lost[address] = LostEvent(since, address, reason)
        self._records.drop(address)
        heir = successor(self._cluster, address, peers.gone)
        if peers.went is not None and self.outcome.change is None and heir is not None:
            self._replace(address, reason, *heir)
            return
        self._evaluation.lose(self._cluster.logical(address))
        if peers.went is None and one.child is not None:
            refuse_program_of(one.child)
        peers.view = peers.view.without(address)
        goes_on = self._changes.goes_on_after(address, reason)
        if peers.went is None and not goes_on:
            raise PeerLost(f"{reason} before the run started")
        if self._checkpoints is not None:
            if goes_on:
                self._checkpoints.end()
            else:
                self._checkpoints.lose(address, None if self._parts > 1 else one.step)
        if goes_on:
            return
        if self.outcome.change is not None:
            self.outcome.change = None
            raise PeerLost(reason)
        one.told = NodeLost(address, reason, peers.view)
        self._records.keep_own_flight()
        traits = None if self.outcome.strategy is None else self.outcome.strategy.traits
        survives = traits is not None and traits.survives and traits.results
        if address >= 0 and peers.view.ranks and survives and not quiet:
            on_stderr(f"{reason}; {len(peers.view.ranks)} of {self._workers} workers continue")
        self._tell_others("lost", address, one.told)

    def _replace(self, address: Address, reason: str, leads: Address, promoted: bool) -> None:
        """A process of a server is lost, and process `leads` of the server continues: tell all nodes."""
        how = ", its backup, continues in its place" if promoted else ", whose backup it was, continues"
        text = f"{reason}; {node_name(leads)}{how}"
        if promoted:
            self.peers[leads].done = False  # it has to send the result
        on_stderr(text)
        self.outcome.warnings.append(text)
        if self._checkpoints is not None:
            self._checkpoints.interrupt(f"{node_name(address)} was lost")
        self._changes.replace(text)
        told = self.peers[address].told = NodeLost(address, reason, self.peers.view, True)
        self._records.keep_own_flight()
        self._tell_others("lost", address, told)

    def _tell_others(self, tag: str, address: Address, note: AnyNote) -> None:
        for other, link in self.peers.links.items():
            if other != address:
                link.tell(tag, note)

    def _dismiss(self, result: FlatArray | None) -> None:
        """Tell all nodes that the run has ended.

        Send the resulting model to nodes that hold another, with the workers' final buffers.
        """
        buffers = {} if result is None else self.outcome.newest.buffers()
        known = None if result is None else fingerprint(result)
        for address, link in self.peers.links.items():
            link.dismiss(None if address < 0 or self._records.hashes.get(address) == known else result, buffers)

    def _end_all(self, error: FlockstepError | None) -> None:
        """After a failure, ask all processes to end, keep what they still send, and kill those that do not
        end in time.
        """
        if error is not None:
            self._records.keep_own_flight()
            for one in self._calls:
                one._stop_all(error)
        patience = GRACE if error is not None or self._script is None else None
        if error is not None and any(p.unfinished is not None for one in self._calls for p in one.peers.values()):
            patience = LAST_CODE  # the exit code of such a script says why the run has ended
        deadline = None if patience is None else time.monotonic() + patience
        last = math.inf if deadline is None else deadline + 2 * GRACE
        while not all(one.peers.ended(address) for one in self._calls for address in one.peers):
            if time.monotonic() > last:
                self._hosts.abandon()
            if deadline is not None and time.monotonic() > deadline:
                kill_all(self._processes())
                if all(child.exit_code() is not None for child in self._processes()):
                    break  # the others are not processes of this host: their links are closed
                deadline += 1.0
            self._collect(LAST_POLL)
        self._collect(0.0)
        if self._script is not None and (error is None or isinstance(error, PeerLost)):
            self._check_exits()

    def _processes(self) -> list[Child]:
        """The processes of all calls' nodes."""
        return [*{id(child): child for one in self._calls for child in one.peers.children.values()}.values()]

    def _stop_all(self, error: FlockstepError) -> None:
        """Ask connected processes to end, and kill those that are about to join."""
        refused = int(isinstance(error, ConfigurationError))
        for address, one in self.peers.items():
            if one.link is not None:
                one.link.tell("stop", {"reason": str(error)[:2000], "refused": refused})
            elif one.child is not None and (self._number == 1 or address < 0 or one.asked):
                one.child.kill()

    def _collect(self, seconds: float) -> None:
        """Store what nodes send while the run ends, for about `seconds`."""
        if not (self._processes() or self.peers.links) or not self._wait(seconds):
            return
        for _, frames in self._heard():
            frames.close()  # no process can join any more
        for one in self._open_calls:
            for link in one.peers.links.values():
                with contextlib.suppress(ProtocolError, RunError):
                    while (message := link.receive()) is not None:
                        if message.tag in ("events", "snapshot", "part", "done", "flight"):
                            one._handle(message)

    def _clean_up(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.end(failed=self.outcome.error is not None)
        reap(self._processes(), GRACE, self._hosts.pump)
        for one in self._open_calls[1:]:
            one.outcome.error = None if one.peers.over else self.outcome.error
            try:
                one._release()
            except FlockstepError as error:
                self.outcome.error = self.outcome.error or error
        self._open.close()

    def _check_exits(self) -> None:
        """Name a script that has failed by its exit code, rather than what its end led to on other workers."""
        for one in self._calls:
            for address, child in one.peers.children.items():
                code = child.exit_code()
                if code in (0, None, ENDED) or any(
                    call.peers[address].gone for call in self._calls if address in call.peers
                ):
                    continue
                step = one.peers[address].unfinished
                when = "the run had ended" if step is None else f"step {step}, before optimizer.finish()"
                if self.outcome.error is None or (step is not None and code > 0):
                    self.outcome.error = RunError(f"{node_name(address)} {how_it_ended(code)} after {when}")
