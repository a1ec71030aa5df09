"""A node in this process, on real messages and in real time."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from flockstep.arrays.namespace import is_tensor
from flockstep.arrays.schema import FlatArray
from flockstep.drivers.member import PAUSE, Member
from flockstep.drivers.messenger import Messenger
from flockstep.drivers.renewal import Reception
from flockstep.drivers.reports import Reports
from flockstep.drivers.runner import Runner
from flockstep.drivers.snapshots import Snapshots
from flockstep.drivers.tracker import FINAL, Progress
from flockstep.errors import FlockstepError, PeerLost
from flockstep.messages import BYE, Address, Message, Wanted, node_name
from flockstep.nodes import Node, Server, Worker
from flockstep.programs import NeedGradient, NeedWork, Rendezvous, Work
from flockstep.records.events import Lost
from flockstep.strategies.base import Strategy
from flockstep.transports.bus import LAUNCHER
from flockstep.transports.shared_group import SUMMED, SharedGroup, room_for

WAIT_PERIOD = 1.0
"""Seconds that a worker waits before it tells the supervisor what for, and between two such reports."""
GLANCE = 0.001
"""Seconds that one wait for a message lasts while background tasks wait for something else."""


class Seat(Messenger):
    """A node's part in the run that this process was started for: its messages, its part in the evaluation."""

    def __init__(self, member: Member, node: Node, strategy: Strategy, every: int = 0):
        """`every`: steps of a worker between two evaluations; 0: there are none."""
        self.reports = Reports(member)
        super().__init__(member.bus, member.receive, node, self.reports.write)
        node.view = member.view
        self.snapshots = Snapshots(member)
        self._member = member
        self._survives = bool(strategy.traits.survives)
        self._moved = 0.0
        self._wanted: Wanted | Work | None = None
        self._left: dict[Address, int] = {}
        self._gone: set[Address] = set()
        self._group: SharedGroup | None = None
        self.runner.hand_in, self.runner.every, self.runner.stepped = self.hand_in, every, self._stepped
        if isinstance(node, Worker):
            self._meet(node)
        elif isinstance(node, Server):
            self.runner.progress = Progress(node.cluster, every) if every else None
            self.runner.reception = Reception(node, strategy)

    def home(self, gradients: FlatArray) -> FlatArray:
        """Where a worker's gradients are to lie: where the sum over all workers can be had in place, or `gradients`."""
        if self._group is None or is_tensor(gradients) or gradients.dtype.name not in SUMMED:
            return gradients
        return self._group.allocate(len(gradients), gradients.dtype.name)

    def drive(self, runner: Runner) -> None:
        """Wait for what the program waits for, until that is a gradient or nothing.

        Raises:
            PeerLost: the strategy cannot go on without a node that died.
            Interrupted: the supervisor ended the run.
        """
        node = self.node
        while (wanted := runner.waiting) is not None and not isinstance(wanted, NeedGradient):
            if node.address < 0:
                self.snapshots.newest(node, self.now, runner.account.traffic.sent_bytes)
            if isinstance(wanted, NeedWork):
                runner.go_on(self._join(wanted.work))
                continue
            self._wanted = wanted
            self._require_others()
            self._tell_waiting()
            idle = not node.poll()
            if (message := self._receive(WAIT_PERIOD if idle else GLANCE, None, wanted)) is not None:
                self.take(message)
            elif idle:
                self.reports.flush()
            runner.wake()
        self._wanted = None

    def all_reduce(self, array: FlatArray, divisor: int = 1) -> bool:
        """Replace `array` by the sum over all workers, divided, in memory that they share; bits and books as of a ring.

        False: it cannot be had this way.

        Raises:
            PeerLost: a worker has left or died.
        """
        group, account = self._group, self.runner.account
        if group is None or not group.can(array):
            return False
        group.all_reduce(array, self._listen, divisor)
        account.waited += group.waited
        account.traffic.moved(*group.moved(array))
        return True

    def hand_in(self, tick: float) -> None:
        """Hand in the node's parameters, as they are now, to be evaluated off the clock."""
        self.snapshots.hand_in(self.node, tick, self.now(), self.runner.account.traffic.sent_bytes)

    def salvage(self) -> None:
        """The run fails: hand in what there is."""
        with contextlib.suppress(FlockstepError):
            self.reports.flush()
        self.snapshots.salvage(self.node, self.now(), self.runner.account.traffic.sent_bytes)

    def close(self) -> None:
        """The program has ended: close the books and hand in the final parameters."""
        self.runner.account.close(self.now(), self.node.params)
        self.hand_in(FINAL)

    def leave(self, failed: bool) -> None:
        """Close what the workers have opened together besides the run's own links."""
        if isinstance(self.node, Worker) and self.node.rendezvous is not None:
            self.node.rendezvous.close(failed)

    def _meet(self, worker: Worker) -> None:
        """Give a worker its ways to the others besides messages."""
        ticket = self._member.ticket
        worker.rendezvous = Rendezvous(
            ticket.run, Path(ticket.record), ticket.address, ticket.workers, self._attend, self._count
        )
        if self._member.memory is not None and worker.workers > 1:
            room = room_for(self._member.schema.nbytes)
            self._group = SharedGroup(self._member.memory, worker.rank, worker.workers, room)
            worker.together = self

    def _count(self, sent: int, received: int, messages: int) -> None:
        """Book what others moved for this node, as far as a formula tells."""
        self.runner.account.traffic.moved(sent, received, messages)
        self.runner.account.estimated_bytes += sent

    def _listen(self) -> None:
        """Hear what came while this node waits for others in memory that they share.

        Raises:
            PeerLost: one of them will never come.
        """
        self._wanted = Wanted("sum")
        self._tell_waiting()
        self.collect()
        self._require_others()
        self._wanted = None
        gone = {peer for peer in self.node.departed if peer >= 0}
        for peer in sorted(gone & self._gone):  # who left since the last time may have taken part in this sum
            raise self.node.missed(Wanted("sum", peer))
        self._gone = gone

    def _attend(self, work: Work) -> None:
        """Wait for work inside a program."""
        if (failure := self._join(work)) is not None:
            raise failure

    def _join(self, work: Work) -> PeerLost | None:
        """Wait until something that goes on outside of messages is done.

        Returns why it failed, if that is the death of a node that the strategy can do without.

        Raises:
            PeerLost: it failed; the supervisor's word of who died, if there is one.
        """
        self._wanted = work
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
            self._require_others()

    def _hear_of_loss(self, failure: PeerLost, to: Address | None = None) -> None:
        """Something failed for want of a peer: wait for the supervisor to say which one is lost, and why."""
        deadline = time.monotonic() + 2 * self._member.ticket.heartbeat
        while not (self.node.lost if to is None else to in self.node.lost):
            self._require_others()
            message = self._receive(max(0.0, deadline - time.monotonic()))
            if message is None:
                raise failure
            self.take(message)

    def unreachable(self, to: Address) -> None:
        """Wait for the supervisor to say that a peer is lost, and go on if the strategy can."""
        here = node_name(self.node.address)
        self._hear_of_loss(PeerLost(f"{node_name(to)} is not reachable from {here}; {self._doing()}"), to)

    def _stepped(self, loss: float | None) -> None:
        """Hear what came meanwhile."""
        self.collect()
        self._moved = self.now()
        self.snapshots.newest(self.node, self.now, self.runner.account.traffic.sent_bytes)

    def _tell_waiting(self) -> None:
        """Tell the supervisor, now and then, what this worker has waited for since its last step."""
        if self.node.address >= 0 and (now := self.now()) - self._moved >= WAIT_PERIOD:
            self._moved = now
            self.reports.flush()
            self._member.tell("waiting", None, {"step": self.node.run_step, "for": str(self._wanted)})

    def take(self, message: Message) -> None:
        """Deliver a message, or do what the supervisor says."""
        super().take(message)
        if message.source != LAUNCHER:
            if message.tag == BYE:
                self._release(message.source)
        elif message.tag == "left" and (address := int(message.note["address"])) not in self._left:
            self._left[address] = int(message.note["step"])
            self._release(address)

    def note_loss(self, address: Address, reason: str) -> None:
        """Put the loss on the record, and end the run where the strategy needs that node."""
        self.reports.write(Lost(self.now(), address, reason))
        if not self._survives or address < 0:
            raise PeerLost(f"{reason}; {self._doing()}")

    def _release(self, address: Address) -> None:
        """Once a worker has left and its last message is here, a server that could do without it has to."""
        if self._survives and self.node.address < 0 and address in self._left and address in self.node.departed:
            self.node.deliver(Message(address, BYE, note={"lost": 1}))
            self.runner.wake()

    def _require_others(self) -> None:
        """Raise `PeerLost` where somebody whom this node cannot do without has left, or cannot be reached any more.

        Where all workers go in step, none can go on once one has left after fewer steps; servers leave last. Who has
        died is known to the supervisor in time; if it knows of nobody, only the connection has broken.
        """
        for peer in self._bus.broken(2 * self._member.ticket.heartbeat) - self.node.lost:
            raise PeerLost(f"the connection to {node_name(peer)} broke, though both live; {self._doing()}")
        for address, step in self._left.items():
            if address >= 0 and not self._survives and self.node.run_step > step:
                raise PeerLost(f"{node_name(address)} left after step {step}; {self._doing()}")

    def _doing(self) -> str:
        who = f"{node_name(self.node.address)} at step {self.node.run_step}"
        return f"{who} waited for {self._wanted}" if self._wanted else f"{who} could not go on"
