"""Connects the processes of a run, watches them, and collects their events and models."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NoReturn

import msgspec

from flockstep.arrays.schema import FlatArray
from flockstep.communicator.joining import rule_of
from flockstep.drivers.event_sender import events_in
from flockstep.drivers.member import AGAIN, WINDOW, Failure, Hello, NodeLost, NodeSpec, Welcome, run_of_call
from flockstep.drivers.node_metrics import fingerprint
from flockstep.drivers.part_group import groups_of
from flockstep.drivers.plan import whole_cluster
from flockstep.drivers.replication import ProgramEvents
from flockstep.drivers.snapshot_tracker import NewestSnapshots
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
from flockstep.launchers.backups import is_replaced, replaced
from flockstep.launchers.checkpoints import Checkpointer
from flockstep.launchers.children import ENDED, Child, how_it_ended, kill_all, reap, refuse_program_of
from flockstep.launchers.communicators import Communicators
from flockstep.launchers.duplicate_batches import DataDigests, GradientFingerprints
from flockstep.launchers.evaluation import SnapshotHandler
from flockstep.launchers.health import Health
from flockstep.launchers.host_messages import ServerSpec
from flockstep.launchers.hosts import OtherHosts
from flockstep.launchers.initial_parts import InitialParts
from flockstep.launchers.join_requests import JoinRequests
from flockstep.launchers.link import ProcessLink
from flockstep.launchers.newcomers import Newcomers
from flockstep.launchers.node_changes import NodeChanges
from flockstep.launchers.node_progress import NodeProgress
from flockstep.launchers.node_records import NodeRecords
from flockstep.launchers.open_files import require_open_files
from flockstep.launchers.run_state import Change, Outcome, RunState
from flockstep.launchers.settings_comparison import SettingsComparison
from flockstep.launchers.signals import undisturbed
from flockstep.launchers.wait_monitor import JOINS_JOB, JOINS_SCRIPT, WaitMonitor, on_stderr
from flockstep.messages import Address, AnyNote, Fields, Message, node_name
from flockstep.nodes import BadGradients, Cluster, View
from flockstep.optimizers.base import Optimizer
from flockstep.records import owner
from flockstep.records.checkpoints import Checkpoint
from flockstep.records.events import Event, LostEvent, StepEvent
from flockstep.records.failpoints import reach
from flockstep.records.flight import decoded
from flockstep.records.scratch import scratch
from flockstep.transports.base import Transport
from flockstep.transports.connection import LINK_TIMEOUT
from flockstep.transports.links import Control, Frames
from flockstep.transports.shared_memory import SharedMemory
from flockstep.transports.wire import PROTOCOL

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


class Supervisor:
    """Supervises one run of `workers` processes and the servers that their strategy needs."""

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
        unjoined: str = "",
        strategy: str = "",
    ):
        """`start_worker` and `start_server` return the started process, or None if the process is started by something
        else; `hosts` starts those of other hosts.

        `evaluation` receives the snapshots that nodes send, servers `every` so many steps. `patience`:
        seconds that processes may continue after a successful run; None, for users' scripts, sets no limit and requires
        exit code 0. `begin_call`: creates the supervisor of a script's later call to `distribute`, from that of the
        first call and the number of the call, 2 for the second; for that one, `within` is the first, and `ended`
        receives the outcome of the call once its nodes have left, or the whole run has ended. `checkpoints` takes the
        run's checkpoints, and knows where the run begins. `least`: smallest number of workers with which the run goes
        on from a checkpoint; None: it does not. `most`: largest number of workers when workers join by `requests`,
        in the processes that `newcomers` starts; None: workers may not join. `joining`: ranks of workers that join from
        now on, without which the run continues if they are lost before all nodes are ready. `epoch`: number of changes
        of the workers so far.
        `back_to`: smallest step of a checkpoint from which the run continues when a server is lost; None: a lost
        server ends the run. `parts`: the parts of a split model; None if every worker holds a whole replica.
        `unjoined`: clause about a script that ends without joining the run. `strategy`: the strategy that replaces
        the one that a script names; empty for the script's own.
        """
        sizes, self._initial = () if parts is None else parts.sizes, parts
        self.outcome = Outcome(workers, sizes=sizes, newest=NewestSnapshots(max(1, len(sizes))))
        self.requests, self.newcomers = requests or JoinRequests(record), newcomers or Newcomers()
        self.standings: dict[Address, NodeProgress] = {rank: NodeProgress() for rank in range(workers)}
        self._state = RunState(workers, self.outcome, View(epoch, tuple(range(workers))), self.standings)
        self.children: dict[Address, Child] = {}
        self._workers, self._transport = workers, transport
        self._heartbeat, self._link_timeout = heartbeat, link_timeout
        self._start_worker = start_worker
        self._start_server = start_server
        self._record, self._show = record, show
        self._patience = patience
        self._hosts = hosts or OtherHosts()
        self._seed, self._imports, self._strategy = seed, imports, strategy
        self._bad_gradients = bad_gradients or BadGradients()
        self._every, self._begin_call, self._checkpoints = every, begin_call, checkpoints
        self._changes = NodeChanges(
            self._state, checkpoints, self._hosts, self.requests, self.newcomers, least, most, back_to, joining
        )
        self._calls: list[Supervisor] = [self] if within is None else within._calls
        """Supervisors of the calls of `distribute` that the scripts have begun; the first one watches the processes."""
        self._number = 1 if within is None else len(self._calls) + 1
        self._asked: set[int] = set()
        """Workers that have begun this call, if it is a later one."""
        self._ended = ended
        self._run: str = secrets.token_hex(8) if within is None else run_of_call(within._run, self._number)
        self._secret: bytes = secrets.token_bytes(32) if within is None else within._secret
        self._evaluation = evaluation or SnapshotHandler()
        self._records = NodeRecords(self._state, record, self._evaluation)
        self._directory, self._open = Path(), contextlib.ExitStack()
        self._links: dict[Address, ProcessLink] = {}
        self._health = Health(self.children, self._links, heartbeat, hint=unjoined)
        joins = JOINS_SCRIPT if patience is None else JOINS_JOB
        interruption = 0.0 if self._hosts.here else 2 * link_timeout
        self._wait_monitor = WaitMonitor(workers, step_timeout, joins=joins, interruption=interruption)
        self._losses: dict[Address, NodeLost] = {}
        self._communicators = Communicators(workers, self._losses, self._state.done)
        data = DataDigests(workers)
        self._comparisons: dict[str, GradientFingerprints | DataDigests | SettingsComparison] = {
            "gradient": GradientFingerprints(workers, lambda: data.heard),
            "data": data,
            "settings": SettingsComparison(workers, lambda: self.outcome.strategy),
        }

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
            begun = self._state.went is not None
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
        return rank in self._links

    def begin_again(self, rank: int, node_spec: NodeSpec, config: str) -> Child:
        """Give the process of a worker the node specification with which it continues; return the process."""
        self._links[rank].tell(AGAIN, {"spec": msgspec.json.encode(node_spec).decode(), "config": config, "wait": 0})
        return self.children.pop(rank)

    def _change_nodes(self, change: Change) -> None:
        """End the scripts, which begin again with other workers, or let the workers of a job wait for this."""
        if self._patience is not None:
            self._let_go(change)
            return
        self._end_all(Interrupted(f"the script begins again with other workers: {change.reason}"))
        self._clean_up()

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
        self._changes.end()
        why, kept = self._why_no_checkpoint(self._checkpoints), self._checkpoints.newest
        if kept is None and self._state.went is None:
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
        if self._state.went is None:
            return "training had not begun"
        try:
            if self._finished():
                return "all workers had taken their last step"
            checkpoints.stop()
            stop = self._time_to_stop(began - self._state.went)
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
        """Remove the snapshots that the nodes have sent so far."""
        self.outcome.newest = NewestSnapshots()
        shutil.rmtree(self._records.snapshots, ignore_errors=True)

    @property
    def failed_later(self) -> bool:
        """Whether the run failed in a later call to `distribute`, after the first call's run had succeeded."""
        return self._state.over and not all(one._state.over for one in self._calls)

    def _start(self) -> None:
        self._directory = self._open.enter_context(scratch())
        self._open.callback(self._transport.clean_up, self._directory)
        self._transport.prepare(self._directory)
        self._control = Control(f"ipc://{self._directory / 'control'}", self._heartbeat)
        self._open.callback(self._control.close)
        self._hosts.why_not_join, self._hosts.let_leave = self._changes.why_no_host_joins, self._changes.let_leave
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
            strategy=self._strategy,
            imports=self._imports,
            bad_gradients=self._bad_gradients,
            secret=self._secret.hex(),
            call=self._number,
            link_timeout=self._link_timeout,
            facts=None if self._initial is None else self._initial.facts,
            checkpoint="" if (resumed := self._resumed()) is None else str(resumed.folder.absolute()),
        )

    def _resumed(self) -> Checkpoint | None:
        """The checkpoint from which the run goes on; None if it begins at its start."""
        return None if self._checkpoints is None else self._checkpoints.resumed

    def _ask_for_call(self, rank: int, number: int) -> None:
        """A worker calls `distribute` for the second time, or for a later one: let it say hello."""
        if self._begin_call is None or not 2 <= number <= len(self._calls) + 1:
            raise ProtocolError(f"a worker began call {number} of distribute, but call {len(self._calls) + 1} is next")
        if number == len(self._calls) + 1:
            later = self._begin_call(self, number)
            later._open_within(self)
            self._calls.append(later)
        call = self._calls[number - 1]
        call._asked.add(rank)
        here = not self._hosts.has(rank)  # on another host the agent's folder serves all calls
        self._links[rank].tell("call", {"directory": str(call._directory)} if here else None)

    def _open_within(self, first: Supervisor) -> None:
        """Begin a later call in the processes that the supervisor of the first one has started."""
        self._hosts = first._hosts
        self.children.update({rank: child for rank, child in first.children.items() if rank >= 0})
        self._directory, self._control = self._open.enter_context(scratch()), first._control

    def _may_release(self) -> bool:
        """Whether this is a later call whose nodes have been dismissed and have left."""
        servers = [child for address, child in self.children.items() if address < 0]
        over = self._number > 1 and self._state.over and all(child.exit_code() is not None for child in servers)
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
        while not all(one._state.over for one in self._calls) or not self._scripts_ended():
            self._poll()
            with undisturbed():  # half a message would look like a broken protocol
                for one in list(self._calls):
                    one._turn(result)
                self._changes.look()
            if self.outcome.change is not None and self._all_losses_known():
                return
            if time.monotonic() - shown > 0.25:
                shown = time.monotonic()
                self._show(self._current().standings)
                owner.check(self._record)
                self._changes.look_for_requests()
        self._show(self._current().standings)

    def _all_losses_known(self) -> bool:
        """Whether no further node has died at the moment of the last loss: a change of the nodes includes all deaths of
        one moment.
        """
        settled = time.monotonic() - self._lost_at >= MOMENT
        return settled and not self._health.dying(self.standings.keys() - self._state.gone)

    @property
    def _open_calls(self) -> list[Supervisor]:
        """The calls whose nodes may still send messages, the first one included."""
        return [one for one in self._calls if not one._released]

    def _current(self) -> Supervisor:
        """The supervisor of the first call whose run is not over; if all are, that of the last call."""
        return next((one for one in self._calls if not one._state.over), self._calls[-1])

    def _scripts_ended(self) -> bool:
        """Whether no process can begin a further call to `distribute`."""
        return self._begin_call is None or all(map(self._health.ended, range(self._workers)))

    def _turn(self, result: Callable[[Outcome], FlatArray | None]) -> None:
        """Look for lost and late nodes of this call, and dismiss its nodes once all have finished."""
        if self._state.over:
            if self._may_release():
                self._release()
            return
        self._look_after_children()
        if self.outcome.change is not None:  # of nodes that were lost just now
            return
        gone = self._state.gone
        self._wait_monitor.look(self._links.keys(), self._state.done | gone, gone)
        self._evaluation.go_on()
        self._tell_early_ends()
        if not self._finished():
            if self._checkpoints is not None:
                with undisturbed():
                    self._checkpoints.look(self.standings)
            return
        assert self.outcome.strategy is not None
        missed = self._state.missed
        for address in missed - self._state.done:  # the others may have finished too when this node was lost
            if address < 0 or not self.outcome.strategy.traits.survives:
                raise PeerLost(self.outcome.lost[address].reason)
        self._lose_early_ends()
        self._dismiss(result(self.outcome))
        self._state.over = True

    def _finished(self) -> bool:
        expected = set(self.standings) - self._state.gone
        if not any(address >= 0 for address in expected):
            raise PeerLost("every worker was lost: " + "; ".join(one.reason for one in self.outcome.lost.values()))
        return bool(self._state.ready) and expected <= self._state.done

    def _poll(self) -> None:
        """Handle the messages of all calls' nodes."""
        self._hosts.require_running()
        if self._wait(LAST_POLL if all(one._state.over for one in self._calls) else POLL):
            with undisturbed():  # half a message would look like a broken protocol
                for words, frames in self._heard():
                    self._accept(words, frames)
                for one in self._open_calls:
                    for link in list(one._links.values()):
                        one._hear(link, TURN)

    def _wait(self, seconds: float) -> bool:
        """Wait up to `seconds` until something has arrived from a node, or from another host."""
        links = [link for one in self._calls for link in one._links.values()]
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
                self._records.flight.note("receive", link.address, message.tag, self.standings[link.address].step)
                self._handle(message)
                most -= 1
        except ProtocolError as error:
            if link.address not in self._state.gone:
                self._lose(link.address, f"{node_name(link.address)} broke the protocol: {error}")

    def _accept(self, data: bytes, frames: Frames) -> None:
        """Let a process in that has said which one it is; close the connection of any other."""
        words, joined = None, False
        with contextlib.suppress(ValueError, RecursionError):
            words = msgspec.msgpack.decode(data, type=Hello | Failure)
        for one in self._open_calls:
            if words is not None and words.run == one._run and words.address in one.standings:
                if isinstance(words, Failure):
                    frames.close()
                    one._fail(words.address, words.kind, words.reason, words.trace)
                joined |= one._hello(words, frames)
        if not joined:
            frames.close()

    def _hello(self, hello: Hello, frames: Frames) -> bool:
        """Link a process; return whether it may join."""
        if hello.beside:
            if known := hello.address in self._links:
                self._communicators.add(hello, frames, self._links)
            return known
        if hello.address in self._links or hello.address in self._state.gone:  # a lost node may not return
            return False
        try:
            self._check_hello(hello)
        except ConfigurationError:
            frames.close()
            raise
        link = self._links[hello.address] = ProcessLink(frames, hello)
        self._open.callback(link.close)
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
            if self._patience is None:
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
        reach("meeting.begun")
        model = self._links[0].hello.schema.nbytes
        peers = {address: link.hello.bus for address, link in self._links.items()}
        if self._parts == 1:
            self._memory = self._transport.share(self._workers, model)
        places: dict[str, list[int]] = {}
        for rank in self._state.view.ranks:
            places.setdefault(self._links[rank].hello.host, []).append(rank)
        hosts = self.outcome.hosts = tuple(map(tuple, places.values()))
        memory, servers, replicas = self._memory, self._cluster.servers, self._cluster.replicas
        welcome = Welcome(self._state.view, hosts, servers, peers, "" if memory is None else memory.address, replicas)
        for address, link in self._links.items():
            link.tell("welcome", welcome)
            if self._initial is not None:
                link.tell("values", None, self._initial.of_node(address, servers // self._parts))

    def _be_ready(self, address: Address) -> None:
        """Begin the run when all nodes are ready."""
        self._state.ready.add(address)
        if len(self._state.ready) < len(self._links):
            return
        resumed = self._resumed()
        self.began = time.monotonic()
        went = self._state.went = self.began - (0.0 if resumed is None else resumed.manifest.seconds)
        if self._checkpoints is not None and self.outcome.strategy is not None:
            self._checkpoints.begin(self._links, self.outcome.strategy, self._cluster)
        self._wait_monitor.begin(bool(self.outcome.strategy and self.outcome.strategy.traits.results))
        self._memory = None
        if self._patience is not None:  # a script may open sockets of a communicator in the folder later
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
                self._communicators.meet(address, self._links, self._directory)
            case "events" | "flight":
                self._keep(address, message)
            case "waiting":
                self._wait_monitor.hear(address, note)
            case "gradient" | "data" | "settings":
                self._comparisons[message.tag].hear(message)
            case "snapshot":
                node, largest = self._cluster.logical(address), self._links[address].hello.largest
                self._records.begin_snapshot(address, node, note, largest)
            case "part":
                self._links[address].tell("taken")
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
        if text not in self.outcome.warnings:
            on_stderr(text)
            self.outcome.warnings.append(text)

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
        self._state.condemned[worker] = reason

    def _begin(self, link: ProcessLink, went: float) -> None:
        """All nodes were ready at `went`: tell this one to begin."""
        self._records.begin(link.address, self._open)
        self.standings[link.address].state = "running"
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
            self._wait_monitor.hear(address, {"step": self.standings[address].step})
            for one in self._calls:
                one._wait_monitor.note_sign(address)

    def _leave(self, address: Address, how: str, step: int) -> None:
        """Handle a node whose script or program has ended, or that takes no more steps."""
        if how == "unfinished":
            self._state.unfinished[address] = step
            return
        if how == "done":
            self._state.done.add(address)
            self.standings[address].state = "done"
            self.standings[address].step = step
        self._tell_others("left", address, {"address": address, "step": step, "how": self._how_left(address, step)})

    def _how_left(self, address: Address, step: int) -> str:
        if address in self._state.unfinished:
            return f"the script of {node_name(address)} ended after step {step} without optimizer.finish()"
        return f"{node_name(address)} left after step {step}"

    def _tell_early_ends(self) -> None:
        """Say once of every script that has ended without `finish()` that another worker has taken more steps. If the
        strategy needs all workers, the other worker says so when it ends the run.
        """
        if not self._survived:
            return
        first = max(range(self._workers), key=lambda rank: self.standings[rank].step)
        for rank, step in self._state.unfinished.items():
            if step < self.standings[first].step and rank not in self._state.early:
                self._state.early[rank] = f"{self._how_left(rank, step)}, and {node_name(first)} went on"
                on_stderr(self._state.early[rank])
                self.outcome.warn(self._state.early[rank])

    def _lose_early_ends(self) -> None:
        """Count the scripts that ended early as lost, so that the result of the run is that of the other workers."""
        if self._state.unfinished.keys() >= {rank for rank in self._state.done if rank >= 0}:
            return  # no script calls finish(), so that an early end may be meant
        assert self._state.went is not None
        for rank, reason in self._state.early.items():
            self.outcome.lost[rank] = LostEvent(time.monotonic() - self._state.went, rank, reason)

    def _fail(self, address: Address, kind: str, reason: str, trace: str) -> NoReturn:
        self.standings[address].state = "failed"
        raise of_kind(kind, reason, f"In {node_name(address)}:\n{trace}" if trace else "")

    def _look_after_children(self) -> None:
        while self._state.condemned:
            address, reason = self._state.condemned.popitem()
            if address >= 0 and address in self._links and address not in self._state.done:
                self._hear(self._links[address])
                self._lose(address, reason)
        for address in list(self.standings):
            how = None if address in self._state.gone else self._health.gone(address)
            link = self._links.get(address)
            if how is not None and link is not None:
                self._hear(link)  # its last messages
            if how is not None and address not in self._state.gone:
                step = self.standings[address].step
                self._lose(address, f"{how} at about step {step}" if step else how)

    def _lose(self, address: Address, reason: str) -> None:
        """Handle the loss of a node; the other workers of a lost worker's replica end with it if the others go on."""
        if self._parts > 1 and address >= 0:
            replica, part = divmod(address, self._parts)
            assert self._initial is not None
            reason = f"{reason}; it held {self._initial.partition.part_name(part)} of replica {replica}"
            for other in range(replica * self._parts, (replica + 1) * self._parts):
                if other != address and other not in self._state.gone and self._survived:
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
        return self._state.went is not None and strategy is not None and bool(strategy.traits.survives)

    def _lose_node(self, address: Address, reason: str, quiet: bool = False) -> None:
        self._state.gone.add(address)
        self._lost_at = time.monotonic()
        if (child := self.children.get(address)) is not None:
            child.kill()
        if (link := self._links.pop(address, None)) is not None:
            link.close()  # the node may only have been stopped: messages that it sends later belong to no run
        since = time.monotonic() - self._state.went if self._state.went is not None else 0.0
        self.outcome.lost[address] = LostEvent(since, address, reason)
        self._records.drop(address)
        self.standings[address].state = "lost"
        began, gone = self._state.went is not None, self._state.gone
        if began and self.outcome.change is None and is_replaced(self._cluster, address, gone):
            self._replace(address, reason)
            return
        self._evaluation.lose(self._cluster.logical(address))
        if self._state.went is None and child is not None:
            refuse_program_of(child)
        self._state.view = self._state.view.without(address)
        goes_on = self._changes.goes_on_after(address, reason)
        if self._state.went is None and not goes_on:
            raise PeerLost(f"{reason} before the run started")
        if self._checkpoints is not None:
            if goes_on:
                self._checkpoints.end()
            else:
                self._checkpoints.lose(address, None if self._parts > 1 else self.standings[address].step)
        if goes_on:
            return
        if self.outcome.change is not None:
            self.outcome.change = None
            raise PeerLost(reason)
        loss = self._losses[address] = NodeLost(address, reason, self._state.view)
        self._records.keep_own_flight()
        traits = None if self.outcome.strategy is None else self.outcome.strategy.traits
        survives = traits is not None and traits.survives and traits.results
        if address >= 0 and self._state.view.ranks and survives and not quiet:
            on_stderr(f"{reason}; {len(self._state.view.ranks)} of {self._workers} workers continue")
        self._tell_others("lost", address, loss)

    def _replace(self, address: Address, reason: str) -> None:
        """A process of a server is lost, and another one continues: tell all nodes."""
        self.outcome.replaced.add(address)
        found = replaced(self._cluster, address, self._state.gone, reason)
        if found.promoted is not None:
            self._state.done.discard(found.promoted)  # it has to send the result
        on_stderr(found.text)
        self.outcome.warnings.append(found.text)
        if self._checkpoints is not None:
            self._checkpoints.interrupt(f"{node_name(address)} was lost")
        self._changes.replace(found.text)
        loss = self._losses[address] = NodeLost(address, reason, self._state.view, True)
        self._records.keep_own_flight()
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
            link.dismiss(None if address < 0 or self._records.hashes.get(address) == known else result, buffers)

    def _end_all(self, error: FlockstepError | None) -> None:
        """After a failure, ask all processes to end, keep what they still send, and kill those that do not
        end in time.
        """
        if error is not None:
            self._records.keep_own_flight()
            for one in self._calls:
                one._stop_all(error)
        patience = self._patience if error is None else GRACE
        if error is not None and any(one._state.unfinished for one in self._calls):
            patience = LAST_CODE  # the exit code of such a script says why the run has ended
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
        if self._patience is None and (error is None or isinstance(error, PeerLost)):
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
        for _, frames in self._heard():
            frames.close()  # no process can join any more
        for one in self._open_calls:
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
            one.outcome.error = None if one._state.over else self.outcome.error
            try:
                one._release()
            except FlockstepError as error:
                self.outcome.error = self.outcome.error or error
        self._open.close()

    def _check_exits(self) -> None:
        """Name a script that has failed by its exit code, rather than what its end led to on other workers."""
        for one in self._calls:
            for address, code in ((address, child.exit_code()) for address, child in one.children.items()):
                if code in (0, None, ENDED) or any(address in call._state.gone for call in self._calls):
                    continue
                step = one._state.unfinished.get(address)
                when = "the run had ended" if step is None else f"step {step}, before optimizer.finish()"
                if self.outcome.error is None or (step is not None and code > 0):
                    self.outcome.error = RunError(f"{node_name(address)} {how_it_ended(code)} after {when}")
