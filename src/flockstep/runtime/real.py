"""Connects a node of a real run, in its own process, to the other nodes and to the supervisor."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from flockstep import nodes
from flockstep.arrays.schema import FlatArray
from flockstep.errors import FlockstepError, PeerLost
from flockstep.links.bus import LAUNCHER
from flockstep.messages import LEAVE, Address, Fields, Message, Wanted, node_name
from flockstep.nodes import Node, Server, Worker
from flockstep.programs import NeedGradient, NeedWork, Rendezvous, SharedArrays, Work
from flockstep.records.events import ClockEvent, Event, LostEvent, RefusedEvent
from flockstep.records.flight import encoded
from flockstep.runtime.checkpoints import CHECKPOINT, NodeCheckpoints
from flockstep.runtime.host_memory import HostMemory, RunMemory
from flockstep.runtime.member import LOSS_TOLD, PAUSE, Member
from flockstep.runtime.messenger import Messenger
from flockstep.runtime.part_group import PartGroup, with_addresses_of_run
from flockstep.runtime.part_link import PartLink
from flockstep.runtime.program_restart import ScriptRequests
from flockstep.runtime.replication import ReplicatedServer, replicate
from flockstep.runtime.reports import EventSender, SnapshotSender
from flockstep.runtime.runner import Runner
from flockstep.runtime.tracker import FINAL, Progress
from flockstep.runtime.user_code import script_call
from flockstep.strategies.base import Strategy

WAIT_PERIOD = 1.0
"""Seconds that a worker waits for a message before it tells the supervisor which message is missing; also the time
between two such reports.
"""
LOOK_PERIOD = 0.02
"""Seconds that a node waits for a message before it looks for what else it has to do, and whether the message can still
arrive.
"""
COLLECT_PERIOD = 0.005
"""Interval in seconds at which a worker that computes without waiting handles the messages that have arrived."""
GLANCE = 0.001
"""Maximum number of seconds of a single wait for a message while background tasks wait for other events."""


class NodeConnection(Messenger):
    """A node's connection to the run for which this process was started: its messages and its snapshots."""

    def __init__(self, member: Member, node: Node, strategy: Strategy, every: int = 0, group: PartGroup | None = None):
        """`every`: steps of a worker between two evaluations; 0 for none. `group`: the group of the node, if the model
        is split.
        """
        self.reports = EventSender(member)
        self._link = None if group is None else PartLink(member, group, bool(strategy.traits.survives))
        bus, receive = (member.bus, member.receive) if self._link is None else (self._link, self._link.receive)
        super().__init__(bus, receive, node, self._report, member.seconds)
        self.reports.write(ClockEvent(self.now(), member.node_spec.address, *member.clock))
        node.view, node.hosts = member.view, member.hosts
        if group is not None:
            node.view, node.hosts = group.view(member.view), group.hosts(member.hosts)
        self.snapshots = SnapshotSender(member, strategy.traits.alike)
        self.checkpoints = NodeCheckpoints(self)
        self.asked_to_leave: Callable[[], bool] = lambda: False
        """Whether a signal asks this worker to leave the run; set by the process."""
        self._leaving = False
        self._member = member
        self._survives = bool(strategy.traits.survives)
        self._moved = self._collected = self._due = 0.0
        self._flown = -math.inf
        """Time at which this node last sent its flight recorder because of a refused gradient."""
        self._noted: Wanted | Work | None = None
        """What this node waited for when it last noted so."""
        self._wanted: Wanted | Work | None = None
        self._left: dict[Address, tuple[int, str]] = {}
        """Node that has left → its last step, and how it left, as a sentence."""
        self._gone: set[Address] = set()
        self._memory: RunMemory | HostMemory | None = None
        self.runner.send_snapshot, self.runner.every, self.runner.stepped = self.send_snapshot, every, self._stepped
        address = member.node_spec.address
        self.runner.metrics.address = address
        if member.tape is not None:
            self.runner.keep(member.tape, self.take)
        self.replication = self.runner.replication = replicate(self.runner, node.cluster, address, self.send)
        node.bad_gradients, self.runner.quarantine = member.node_spec.bad_gradients, self._quarantine
        if isinstance(node, Worker):
            self._meet(node)
        elif isinstance(node, Server):
            self.runner.progress = Progress(node.cluster, every) if every else None
            self.runner.script_requests = ScriptRequests(node, strategy)

    def _quarantine(self, address: Address, reason: str) -> None:
        """Ask the supervisor to remove a worker from the run; this process continues until it does."""
        self.reports.flush()
        self._member.tell("quarantine", None, {"address": address, "reason": reason})

    def home(self, gradients: FlatArray) -> FlatArray:
        """Return an array for a worker's gradients: one in shared memory if workers can sum there, otherwise
        `gradients` itself.
        """
        return gradients if self._memory is None else self._memory.home(gradients)

    def taken_home(self, gradients: FlatArray) -> FlatArray:
        """Return `gradients`, copied out of shared memory if `home` placed them there, because the run ends."""
        return gradients if self._memory is None else self._memory.taken_home(gradients)

    def drive(self, runner: Runner) -> None:
        """Deliver messages until the program waits for a gradient, or has ended.

        Raises:
            PeerLost: the strategy cannot continue without a node that died.
            Interrupted: the supervisor ended the run.
        """
        while (wanted := runner.waiting) is not None and not isinstance(wanted, NeedGradient):
            if isinstance(wanted, NeedWork):
                runner.go_on(self._join(wanted.work))
                continue
            self.wait_once(wanted)
            runner.wake()
        self._wanted = None

    def wait_once(self, wanted: Wanted) -> None:
        """Deliver the next message, or wait a limited time for one, while this node waits for `wanted`.

        Where messages arrive without a pause, `_look_around` is called from time to time only.

        Raises:
            PeerLost: this node cannot continue without a node that was lost.
        """
        now = self.now()
        if wanted is not self._wanted:
            self._wanted, self._due = wanted, min(self._due, now + LOOK_PERIOD)
        seconds = self._due - now
        if seconds <= 0 or self._left:
            self._look_around(wanted)
            self._due, seconds = now + WAIT_PERIOD, WAIT_PERIOD
        idle = not (self.node.tasks and nodes.poll(self.node))
        if (message := self._next(seconds if idle else GLANCE, wanted)) is not None:
            self.take(message)
        elif idle:
            self.reports.flush()

    def _look_around(self, wanted: Wanted) -> None:
        """Do what a waiting node does besides receiving messages.

        Raises:
            PeerLost: this node cannot continue without a node that was lost.
        """
        self._require_others()
        self._tell_leaving()
        self._tell_waiting()
        self._note_waiting(wanted)
        if self.node.address < 0 and self.leads:
            self.snapshots.newest(self.node, self.now, self.runner.metrics.traffic.sent_bytes)

    def _note_waiting(self, wanted: Wanted | Work) -> None:
        """Note once in the flight recorder what this node waits for."""
        if wanted is not self._noted:
            self._noted = wanted
            peer = wanted.source if isinstance(wanted, Wanted) else None
            self.flight.note("wait", peer, str(wanted), self.node.step)

    def _report(self, event: Event) -> None:
        """Send an event to the supervisor; after a refused gradient, the flight recorder too, at most once a second."""
        self.reports.write(event if self._link is None else with_addresses_of_run(event, self._link.group))
        if isinstance(event, RefusedEvent) and time.monotonic() - self._flown >= 1.0:
            self._flown = time.monotonic()
            self.send_flight()

    def send_flight(self) -> None:
        """Send the contents of the flight recorder to the supervisor, because a fault has occurred."""
        offset = self.now() - time.monotonic()
        for payload in encoded(self.flight.taken(lambda seconds: seconds + offset)):
            self._member.tell("flight", np.frombuffer(payload, np.uint8))

    def _next(self, seconds: float, wanted: Wanted | None = None) -> Message | None:
        """The next message; what the supervisor has asked for a checkpoint is answered when none has arrived."""
        if self.checkpoints.asked:
            if (message := self._receive(0, None, wanted)) is not None:
                return message
            self.checkpoints.idle()
        return self._receive(seconds, None, wanted)

    def attend_stopped(self) -> None:
        """Wait for the next message from a node that has stopped for a checkpoint, and handle it."""
        if (message := self._next(WAIT_PERIOD if not nodes.poll(self.node) else GLANCE)) is not None:
            self.take(message)
        self.retry()
        self._tell_leaving()
        self._require_others()

    def tell(self, tag: str, note: Fields) -> None:
        """Send a message to the supervisor, after all events so far."""
        self.reports.flush()
        self._member.tell(tag, None, note)

    def send_snapshot(self, tick: float, params: FlatArray | None = None) -> None:
        """Send a snapshot of `params` (default: the node's current parameters) to the supervisor, which evaluates the
        snapshot off the run's clock.
        """
        if self.runner.tape is not None:
            self.runner.tape.snapshot(tick, self.node.run_step, self.node.params if params is None else params)
        self.snapshots.send_snapshot(self.node, tick, self.now(), self.runner.metrics.traffic.sent_bytes, params)

    @property
    def address(self) -> Address:
        """Address of this node in the run."""
        inside = self.node.address
        return inside if self._link is None else self._link.group.outside(inside)

    @property
    def directory(self) -> Path:
        """Folder of this node's sockets."""
        return Path(self._member.node_spec.directory)

    @property
    def leads(self) -> bool:
        """Whether this process is the primary of its node, not a backup of a server."""
        return not isinstance(self.replication, ReplicatedServer) or self.replication.leads

    @property
    def unsettled(self) -> bool:
        """Whether messages have arrived that this server's backups may not have received."""
        return isinstance(self.replication, ReplicatedServer) and self.replication.unsettled

    def salvage(self) -> None:
        """Send the supervisor the buffered events, the flight recorder and the current parameters, because the run is
        failing.
        """
        with contextlib.suppress(FlockstepError):
            self.reports.flush()
            self.send_flight()
        if self.leads:
            self.snapshots.salvage(self.node, self.now(), self.runner.metrics.traffic.sent_bytes)

    def close(self) -> None:
        """Write the totals of a program that has ended to the record, and send the final parameters.

        Raises:
            PeerLost: a node that this node needs has left.
        """
        while self.unsettled:
            self.attend_stopped()
        self.checkpoints.close()
        if self.replication is not None:
            self.replication.close()
        self.runner.metrics.close(self.now(), self.node.params)
        assert self.runner.send_snapshot is not None
        self.runner.send_snapshot(FINAL)
        if not self.leads:
            self.tell("done", {"step": self.node.run_step})

    def attend(self, message: Message) -> None:
        """Deliver a message to the background tasks that still run after the end of the node's program."""
        found = message if self._link is None else self._link.within(message)
        if found is None:
            return
        message, said = found, found.source == LAUNCHER
        replicas = self.replication is not None and (not said or (message.tag == "lost" and message.note.replaced))
        if self.node.tasks or replicas or (said and message.tag == CHECKPOINT):
            self.take(message)
            self.checkpoints.idle()

    def leave(self, failed: bool) -> None:
        """Close the connections between workers that were opened in addition to the run's own links."""
        self._memory = None
        if isinstance(self.node, Worker):
            self.node.shared = SharedArrays()
            if self.node.rendezvous is not None:
                self.node.rendezvous.close(failed)

    def _meet(self, worker: Worker) -> None:
        """Give a worker its ways of communication other than messages."""
        node_spec = self._member.node_spec
        run = node_spec.run if self._link is None else f"{node_spec.run}.{self._link.group.part}"
        worker.rendezvous = Rendezvous(
            run, Path(node_spec.record), worker.rank, worker.workers, self._attend, self._count
        )
        user = worker, self.runner.metrics, self._listen
        if (segment := self._member.memory) is not None and worker.workers > 1:
            self._memory = RunMemory(self._member.group(segment, worker.rank, worker.workers), *user)
        elif (segment := self._member.host_memory) is not None:
            host, nbytes = next(host for host in worker.hosts if worker.rank in host), self._member.schema.nbytes
            self._memory = HostMemory(self._member.group(segment, host.index(worker.rank), len(host)), *user, nbytes)
        if self._memory is not None:
            worker.shared = self._memory

    def _count(self, sent: int, received: int, messages: int) -> None:
        """Count traffic that another library moved for this node, as computed by a formula."""
        self.runner.metrics.traffic.moved(sent, received, messages)
        self.runner.metrics.estimated_bytes += sent

    def _listen(self) -> None:
        """Handle messages while this node waits for others in shared memory.

        Raises:
            PeerLost: one of the others will never arrive.
        """
        self._wanted = Wanted("sum")
        self._tell_waiting()
        self.collect()
        self.checkpoints.idle()
        self._require_others()
        self._wanted = None
        gone = {peer for peer in self.node.departed if peer >= 0}
        for peer in sorted(gone & self._gone):  # a worker that left since the last call may have taken part in this sum
            raise nodes.missed(self.node, Wanted("sum", peer))
        self._gone = gone

    def _attend(self, work: Work) -> None:
        """Wait for an operation inside a program."""
        if (failure := self._join(work)) is not None:
            raise failure

    def _join(self, work: Work) -> PeerLost | None:
        """Wait until an operation outside of messages is done.

        Returns the failure if it is the death of a node that the strategy can continue without; otherwise None.

        Raises:
            PeerLost: the operation failed; the error names the lost node if the supervisor knows it.
        """
        self._wanted = work
        self._note_waiting(work)
        while True:
            try:
                if work.wait(PAUSE):
                    self._wanted = None
                    return None
            except PeerLost as failure:
                self._hear_of_loss(failure)
                return failure
            self._tell_waiting()
            self.collect()
            self.checkpoints.idle()
            self._require_others()

    def _hear_of_loss(self, failure: PeerLost, to: Address | None = None) -> None:
        """After a failure caused by a peer, wait for the supervisor's report of the lost node."""
        deadline = time.monotonic() + 2 * self._member.node_spec.heartbeat
        while not (self.node.lost if to is None else to in self.node.lost | self.gone):
            self._require_others()
            message = self._receive(max(0.0, deadline - time.monotonic()))
            if message is None:
                raise failure
            self.take(message)

    def unreachable(self, to: Address) -> None:
        """Wait for the supervisor's report that a peer is lost; continue if the strategy can continue without the
        peer.
        """
        here = node_name(self.node.address)
        self._hear_of_loss(PeerLost(f"{node_name(to)} is not reachable from {here}; {self._doing()}"), to)

    def _stepped(self, loss: float | None) -> None:
        """Handle messages that arrived during a step."""
        self._tell_leaving()
        now = self.now()
        if now - self._collected >= COLLECT_PERIOD or self.node.tasks:
            self._collected = now
            self.collect()
            self.checkpoints.report()
        self.flight.note("step", None, "", self.node.step)
        self._moved = self.now()
        self.snapshots.newest(self.node, self.now, self.runner.metrics.traffic.sent_bytes)

    def _tell_leaving(self) -> None:
        """Tell the supervisor, once, that a signal asks this worker to leave."""
        if not self._leaving and self.asked_to_leave():
            self._leaving = True
            self.tell("leave", {})

    def _tell_waiting(self) -> None:
        """Report to the supervisor, once per `WAIT_PERIOD`, what this worker has waited for since its last step."""
        if self.node.address >= 0 and (now := self.now()) - self._moved >= WAIT_PERIOD:
            self._moved = now
            self.reports.flush()
            call, wanted = script_call(), self._wanted
            together = isinstance(wanted, Wanted) and wanted.by_script
            what = str(wanted) if call is None else f"{wanted} in {call}"
            if call is not None and together:
                what = f"the other ranks in {call}, which every rank must call"
            name = "" if not together else "finish" if call is None else call.function
            self._member.tell("waiting", None, {"step": self.node.run_step, "for": what, "together": name})

    def take(self, message: Message) -> None:
        """Deliver a message from a peer, or carry out an instruction of the supervisor."""
        super().take(message)
        if message.source != LAUNCHER:
            if self._left:
                for address in [message.source] if message.tag == LEAVE else self._left if self.replication else ():
                    self._release(address)
        elif message.tag == CHECKPOINT:
            self.checkpoints.hear(message.note)
        elif message.tag == "left" and (address := int(message.note["address"])) not in self._left:
            self._left[address] = int(message.note["step"]), str(message.note["how"])
            self._release(address)

    def note_loss(self, address: Address, reason: str) -> None:
        """Record that a node is lost, and end the run if the strategy needs this node."""
        lost = address if self._link is None else self._link.group.outside(address)
        self.reports.write(LostEvent(self.now(), lost, reason))
        if not self._survives or address < 0:
            raise PeerLost(f"{reason}; {self._doing()}")
        self.send_flight()

    def _release(self, address: Address) -> None:
        """Tell a server that continues without lost workers that a worker has left, once its last message
        has arrived.
        """
        if self._survives and self.node.address < 0 and address in self._left and address in self.node.departed:
            if isinstance(self.replication, ReplicatedServer):
                self.replication.release(address)
                return
            nodes.deliver(self.node, Message(address, LEAVE, note={"lost": 1}))
            self.runner.wake()

    def _require_others(self) -> None:
        """Raise `PeerLost` if a node that this one needs has left or can no longer be reached.

        If all workers proceed in step, none can continue after one has left with fewer steps; servers leave last. The
        supervisor reports dead nodes in time; if it reports none, only the connection has broken.
        """
        for peer in self._bus.broken(LOSS_TOLD * self._member.node_spec.heartbeat) - self.node.lost - self.gone:
            raise PeerLost(f"{self._bus.why_broken(peer)}, although both processes are alive; {self._doing()}")
        for address, (step, how) in self._left.items():
            if address >= 0 and not self._survives and self.node.run_step > step:
                raise PeerLost(
                    f"{how}; {self._doing()}; if batches run out at different "
                    "steps on different ranks, train under optimizer.join()"
                )

    def _doing(self) -> str:
        here = self.node.address if self._link is None else self._member.node_spec.address
        who = f"{node_name(here)} at step {self.node.run_step}"
        return f"{who} waited for {self._wanted}" if self._wanted else f"{who} could not continue"
