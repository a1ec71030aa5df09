"""Runs one node's program in this process, on real messages and in real time."""

from __future__ import annotations

import time
from pathlib import Path

from flockstep.arrays.schema import FlatArray
from flockstep.drivers.account import Account, Emit
from flockstep.drivers.any_seat import AnySeat
from flockstep.drivers.member import PAUSE, Member, stopped
from flockstep.drivers.renewal import Reception
from flockstep.drivers.settings import taken_over
from flockstep.drivers.snapshots import Snapshots
from flockstep.drivers.tracker import FINAL, Progress
from flockstep.errors import PeerLost
from flockstep.messages import BYE, Address, Message, Wanted, node_name
from flockstep.nodes import Node
from flockstep.programs import GRADIENT, Effect, NeedGradient, NeedWork, Program, Rendezvous, Work
from flockstep.records.events import Lost
from flockstep.strategies.finite import require_finite_gradient, require_finite_message
from flockstep.transports.bus import LAUNCHER, Backlog

PROGRESS_PERIOD = 0.2
"""Seconds between two reports of progress to the supervisor."""
WAIT_PERIOD = 1.0
"""Seconds that a worker waits before it tells the supervisor what for, and between two such reports."""
GLANCE = 0.001
"""Seconds that one wait for a message lasts while background tasks wait for something else."""


class Missed(Exception):
    """What a program waits for cannot come any more: for the program to deal with, if it can."""

    def __init__(self, error: PeerLost):
        super().__init__(str(error))
        self.error = error


class Seat:
    """The driver's side of a node in this process: its messages, its books, its part in the evaluation."""

    def __init__(self, member: Member, survives: bool, every: int, emit: Emit):
        self.account = Account(member.ticket.address, emit, member.bus.traffic)
        self.node: Node
        self.progress: Progress | None = None
        self.reception: Reception | None = None  # what a server answers besides its program
        self.snapshots = Snapshots(member)
        self._member = member
        self._survives = survives
        self._every = every
        self._emit = emit
        self._start = time.monotonic()
        self._reported = -PROGRESS_PERIOD
        self._moved = 0.0
        self._wanted: Wanted | Work | None = None
        self._left: dict[Address, int] = {}
        self._gone: set[Address] = set()

    @property
    def now(self) -> float:
        """Seconds since all nodes were ready."""
        return time.monotonic() - self._start

    def send(self, to: Address, message: Message) -> None:
        """Send to a peer; what goes to a lost one goes nowhere."""
        while to not in self.node.lost:
            try:
                self._member.bus.send(to, message)
            except Backlog:  # it is slow: whether it is lost is for the supervisor to say
                arrived = self._member.receive(PAUSE)
                if arrived is not None:
                    self._take(arrived)
            except PeerLost as error:
                self._verdict(to, error)
            else:
                return

    def collect(self) -> None:
        """Take in what has arrived by now."""
        while (message := self._member.receive(0)) is not None:
            self._take(message)
        self.node.poll()

    def listen(self) -> None:
        """Hear what came while this node waits for others in memory that they share.

        Raises:
            PeerLost: one of them will never come.
        """
        self._wanted = Wanted("sum")
        self._tell_waiting()
        self.collect()
        self._look_for_leavers()
        self._wanted = None
        gone = {peer for peer in self.node.departed if peer >= 0}
        for peer in sorted(gone & self._gone):  # who left since the last time may have taken part in this sum
            raise self.node.missed(Wanted("sum", peer))
        self._gone = gone

    def updates(self, source: Address | None, count: int, staleness: int | None, weight: float | None = None) -> None:
        """Write to the record."""
        self.account.updates(self.now, source, count, staleness, weight)

    def figure(self, name: str, value: float) -> None:
        """Write to the record."""
        self.account.figure(self.now, name, value)

    def moved(self, sent: int, received: int, messages: int) -> None:
        """Book what others moved for this node, as far as a formula tells."""
        self.account.traffic.moved(sent, received, messages)
        self.account.estimated_bytes += sent

    def wait(self, wanted: Wanted) -> Message:
        """The message that the program waits for.

        Raises:
            Missed: it can never come.
            PeerLost: the strategy cannot go on without a node that died.
            Interrupted: the supervisor ended the run.
            Renewed: the program of this server is to begin anew.
        """
        node, self._wanted = self.node, wanted
        while True:
            self._look_for_leavers()
            if self.reception is not None:
                self.reception.attend(idle=wanted == Wanted())
            self._tell_waiting()
            if (message := self._member.receive(GLANCE if node.poll() else WAIT_PERIOD)) is not None:
                self._take(message)
            if self.reception is not None and self.reception.stopped:
                continue
            found = node.mailbox.take(wanted)
            if found is not None:
                self._wanted = None
                return found
            if wanted.source in node.departed:
                raise Missed(node.missed(wanted))

    def join(self, work: Work) -> None:
        """Wait until something that goes on outside of messages is done.

        Raises:
            Missed: it failed, since a node died that the strategy can do without.
            PeerLost: it failed; the supervisor's word of who died, if there is one.
        """
        self._wanted = work
        while not self._ended(work):
            self._tell_waiting()
            self.collect()
            self._look_for_leavers()
        self._wanted = None

    def meeting(self) -> Rendezvous:
        """Where this worker finds the others outside of messages."""
        ticket = self._member.ticket
        return Rendezvous(ticket.run, Path(ticket.record), ticket.address, ticket.workers, self._attend, self.moved)

    def _attend(self, work: Work) -> None:
        """Wait for work inside a program."""
        try:
            self.join(work)
        except Missed as missed:
            raise missed.error from None

    def report(self, loss: float | None) -> None:
        """Hear what came meanwhile; tell the supervisor how far this worker is, now and then."""
        self.collect()
        now = self._moved = self.now
        if now - self._reported >= PROGRESS_PERIOD:
            self._reported = now
            note = {"step": self.node.run_step, "t": now}
            self._member.tell("progress", None, note if loss is None else {**note, "loss": loss})
        self.snapshots.newest(self.node, lambda: self.now, self.account.traffic.sent_bytes)

    def _tell_waiting(self) -> None:
        """Tell the supervisor, now and then, what this worker has waited for since its last step."""
        if self.node.address >= 0 and self.now - self._moved >= WAIT_PERIOD:
            self._moved = self.now
            self._member.tell("progress", None, {"step": self.node.run_step, "for": str(self._wanted)})

    def tick(self) -> None:
        """A worker is about to compute: hand in its parameters if an evaluation is due."""
        if self._every and self.node.step % self._every == 0:
            self.hand_in(self.node.step // self._every)

    def server_ticks(self) -> None:
        """A server has dealt with its messages: hand in its parameters if an evaluation is due."""
        if self.progress is not None:
            for tick in self.progress.due():
                self.hand_in(tick)
        if self.node.address < 0:
            self.snapshots.newest(self.node, lambda: self.now, self.account.traffic.sent_bytes)

    def hand_in(self, tick: float) -> None:
        """Hand in the node's parameters, as they are now, to be evaluated off the clock."""
        self.snapshots.hand_in(self.node, tick, self.now, self.account.traffic.sent_bytes)

    def salvage(self) -> None:
        """The run fails: hand in what there is."""
        self.snapshots.salvage(self.node, self.now, self.account.traffic.sent_bytes)

    def close(self) -> None:
        """The program has ended: close the books and hand in the final parameters."""
        self.account.close(self.now, self.node.params)
        self.hand_in(FINAL)

    def _take(self, message: Message) -> None:
        if message.source == LAUNCHER:
            self._obey(message)
            return
        if self.reception is not None and self.reception.hears(message):
            return
        require_finite_message(self.node, message)
        if self.progress is not None:
            self.progress.heard(message)
        if taken_over(self.node, message):
            return
        self.node.deliver(message)
        if message.tag == BYE:
            self._release(message.source)

    def _obey(self, message: Message) -> None:
        if message.tag == "stop":
            raise stopped(message)
        if message.tag == "lost":
            address, reason = int(message.note["address"]), str(message.note["reason"])
            self._emit(Lost(self.now, address, reason))
            self._member.bus.disconnect(address)
            if not self._survives or address < 0:
                raise PeerLost(f"{reason}; {self._doing()}")
            self.node.lose(address)
        if message.tag == "left" and (address := int(message.note["address"])) not in self._left:
            self._left[address] = int(message.note["step"])
            self._release(address)

    def _release(self, address: Address) -> None:
        """Once a worker has left and its last message is here, a server that could do without it has to."""
        if self._survives and self.node.address < 0 and address in self._left and address in self.node.departed:
            self.node.deliver(Message(address, BYE, note={"lost": 1}))

    def _look_for_leavers(self) -> None:
        """Where all workers go in step, none can go on once one has left after fewer steps; servers leave last."""
        for address, step in self._left.items():
            if address >= 0 and not self._survives and self.node.run_step > step:
                raise PeerLost(f"{node_name(address)} left after step {step}; {self._doing()}")

    def _doing(self) -> str:
        who = f"{node_name(self.node.address)} at step {self.node.run_step}"
        return f"{who} waited for {self._wanted}" if self._wanted else f"{who} could not go on"

    def _ended(self, work: Work) -> bool:
        """Whether it is done; if it failed for want of a peer, wait for the supervisor to say which one, and why."""
        try:
            return work.wait(PAUSE)
        except PeerLost as failure:
            error = failure
        deadline = time.monotonic() + 2 * self._member.ticket.heartbeat
        while not self.node.lost:
            self._look_for_leavers()
            message = self._member.receive(max(0.0, deadline - time.monotonic()))
            if message is None:
                raise error
            self._take(message)
        raise Missed(error)

    def _verdict(self, to: Address, error: PeerLost) -> None:
        """A peer is unreachable: wait for the supervisor to say that it is lost, and go on if the strategy can."""
        deadline = time.monotonic() + 2 * self._member.ticket.heartbeat
        while to not in self.node.lost:
            message = self._member.receive(max(0.0, deadline - time.monotonic()))
            if message is None:
                raise PeerLost(f"{error}; {self._doing()}") from None
            self._take(message)


class Runner:
    """Drives a program from one gradient to the next. `need` is the gradient that it waits for."""

    def __init__(self, program: Program, seat: AnySeat):
        self.need = GRADIENT
        self._program = program
        self._seat = seat
        self._last = seat.now
        self._whole: tuple[FlatArray, float | None] | None = None
        self._looked_at: int | None = None  # where the parts of a gradient begin that have been looked at

    @property
    def awaited(self) -> int:
        """The first element of the part of the gradient that the program waits for; 0: it waits for the whole."""
        return round((1 - self.need.share) * len(self._seat.node.params))

    def advance(self, value: FlatArray | None, loss: float | None = None, whole: bool = True) -> bool:
        """Resume the program, with the gradient that it has asked for and the loss it belongs to.

        Of a `value` that is not `whole`, only the part that it has asked for is there. Returns whether it asks for
        (another) gradient; False means that it has ended.
        """
        seat = self._seat
        reply: FlatArray | Message | PeerLost | None = value
        if value is not None:
            self._lap("compute")
            self._look_at(value, 0 if whole else self.awaited)
            given_up = self._given_up()
            reply = value if given_up is None else given_up
            self._used(value, loss, given_up is not None)
            if not whole:
                self._whole = None
        while True:
            try:
                if isinstance(reply, PeerLost):
                    effect: Effect = self._program.throw(reply)
                else:
                    effect = self._program.send(reply)
            except StopIteration:
                self._lap("comm")
                return False
            if isinstance(effect, NeedGradient):
                self._lap("comm")
                reply = self._at_hand(effect)
                if reply is not None:
                    continue
                if whole:
                    seat.tick()
                self._last = seat.now
                return True
            seat.server_ticks()
            self._lap("comm")
            try:
                if isinstance(effect, NeedWork):
                    reply = None
                    seat.join(effect.work)
                else:
                    reply = seat.wait(effect)
            except Missed as missed:
                reply = missed.error
            self._lap("wait")

    def close(self) -> None:
        """End the program where it is."""
        self._program.close()

    def _look_at(self, gradient: FlatArray, begin: int) -> None:
        """Look at what is new in the gradient: a strategy may have changed the parts that it was given before."""
        whole = self.need.size(len(self._seat.node.params))  # what lies behind it was never written
        require_finite_gradient(self._seat.node, gradient, begin, self._looked_at or whole)
        self._looked_at = begin or None

    def _used(self, value: FlatArray, loss: float | None, given_up: bool = False) -> None:
        """The gradient goes to the program: a step is complete, unless more of it or other gradients belong to it."""
        self._whole = (value, loss) if self.need.share < 1 else None
        if self.need.closes or given_up:
            self._seat.account.step(self._last, loss)
            self._seat.report(loss)

    def _at_hand(self, need: NeedGradient) -> FlatArray | Message | None:
        """What can be had without computing: the rest of a gradient, or the message that makes one needless."""
        rest = self._whole if self.need.share < need.share else None
        self.need = need
        if rest is not None:
            self._used(*rest)
            return rest[0]
        given_up = self._given_up()
        if given_up is not None:
            self._seat.account.step(self._seat.now, None)
        return given_up

    def _given_up(self) -> Message | None:
        if self.need.unless is None:
            return None
        self._seat.collect()
        return self._seat.node.mailbox.take(Wanted(self.need.unless))

    def _lap(self, kind: str) -> None:
        now = self._seat.now
        account = self._seat.account
        waited, account.waited = min(account.waited, now - self._last), 0.0
        account.spent(kind, self._last, now - waited)
        account.spent("wait", now - waited, now)
        self._last = now
