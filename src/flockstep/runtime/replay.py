"""Repeats a recorded run in one process: the programs of all nodes, each in a thread, of which one runs at a time.

A thread waits until the message that its tape names has been sent.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Condition, Thread
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from flockstep.arrays.schema import FlatArray, Schema, slices
from flockstep.errors import Interrupted
from flockstep.links.bus import Traffic
from flockstep.links.shared_group import SharedGroup, needed, room_for
from flockstep.links.shared_memory import SharedMemory
from flockstep.messages import Address, Fields, Message, Notes, Wanted, frozen, node_name
from flockstep.nodes import Cluster, Node, View
from flockstep.records.events import Event
from flockstep.records.tape import MessageEntry, tape_file
from flockstep.runtime.checkpoints import CHECKPOINT
from flockstep.runtime.clock import ClockOffset
from flockstep.runtime.follower import Agreement, Difference, Follower, MessageSource, TapeEnded
from flockstep.runtime.member import AGAIN, BeginAgain, Failure, Member, NodeSpec, begin_again
from flockstep.runtime.part_group import NodePart
from flockstep.runtime.reports import events_in

PAUSED = "a later call"
"""What a worker waits for that has taken the number of steps at which all wait."""
PLACE_SECONDS = 1e-3
"""Seconds on a node's clock for each place on its tape."""
R = TypeVar("R")


class Unlike(Interrupted):
    """Raised in all programs once one of them has done something else than its tape says."""


Flight = defaultdict[tuple[Address, Address], deque[Message]]
"""Sender and receiver → the messages that have not entered the receiver's program."""


class Seat(NamedTuple):
    """A node in a segment of the run, whose tapes are in the folder `tapes`."""

    tapes: str
    node: Address


@dataclass(eq=False)
class ReplayStage:
    """What the threads of a replay share: the messages in flight, and which of the threads may run."""

    until: int | None = None
    """Number of steps after which each worker waits; None: none waits."""
    segments: dict[str, Flight] = field(default_factory=dict)
    """Folder of the tapes of a segment → its messages in flight: what was sent before a change does not arrive."""
    nodes: dict[Address, Node] = field(default_factory=dict)
    initial: FlatArray | None = None
    """The parameters with which the run began."""
    differs: Difference | None = None
    agreements: list[Agreement] = field(default_factory=list)
    gradients: int = 0
    """Number of gradients that were equal."""
    messages: int = 0
    """Number of messages that have entered programs."""
    failures: dict[Address, str] = field(default_factory=dict)
    """Node → why its program has failed."""
    watched: Callable[[Node, int], None] | None = None
    """Called with a node and its place at each of its turns."""
    heard: Callable[[Event], None] | None = None
    """Called with the events of the nodes."""

    def __post_init__(self) -> None:
        self._turn = Condition()
        self._waits: dict[Seat, tuple[Callable[[], bool], str]] = {}
        self._over: set[str] = set()
        self._running = 0
        self._memory: dict[str, SharedMemory] = {}
        self._met: dict[tuple[str, int], dict[int, Any]] = {}
        self._results: dict[tuple[str, int], tuple[Any, int]] = {}

    def begin(self, threads: Sequence[Thread]) -> None:
        """Start threads, whose work is done within `playing`."""
        with self._turn:
            self._running += len(threads)
            for thread in threads:
                thread.start()

    @contextmanager
    def playing(self) -> Iterator[None]:
        """Context manager in which a thread runs while no other does."""
        with self._turn:
            try:
                yield
            finally:
                self._running -= 1
                self._turn.notify_all()

    def run(self) -> None:
        """Wait until every thread has ended, or waits for what no other thread will do."""
        with self._turn:
            self._turn.wait_for(lambda: self._running == len(self._waits) and not self._can_go_on())

    @property
    def paused(self) -> bool:
        """Whether a worker waits because it has taken the number of steps at which all wait."""
        return any(what == PAUSED for _, what in self._waits.values())

    def end(self, tapes: str) -> None:
        """End the programs of a segment, which wait; one that waits for something that its tape names, and that no
        other program does any more, has met the first difference.
        """
        with self._turn:
            here = {seat: what for seat, (_, what) in self._waits.items() if seat.tapes == tapes}
            for seat, what in here.items():
                if what not in (PAUSED, "") and not self.paused:
                    step = self.nodes[seat.node].run_step
                    self.differ(Difference(seat.node, step, f"it waits for {what}, which never came"))
            self._over.add(tapes)
            self._turn.notify_all()
            self._turn.wait_for(lambda: all(seat.tapes != tapes for seat in self._waits))

    def continue_until(self, step: int | None) -> None:
        """Let the workers that wait go on, until they have taken `step` steps."""
        with self._turn:
            self.until = step
            self._turn.notify_all()

    def _can_go_on(self) -> bool:
        return any(ready() for ready, _ in self._waits.values())

    def wait(self, seat: Seat, ready: Callable[[], bool], what: str) -> None:
        """Let other threads run until this one is ready; `what` it waits for, empty if its tape does not say."""
        if not ready():
            self._waits[seat] = ready, what
            self._turn.notify_all()
            try:
                self._turn.wait_for(lambda: seat.tapes in self._over or ready())
            finally:
                del self._waits[seat]
        if self.differs is not None or seat.tapes in self._over:
            raise Unlike("the replay has ended")

    def differ(self, difference: Difference) -> Unlike:
        """Note the first difference, and return the error that ends the program that found it."""
        self.differs = self.differs or difference
        return Unlike(str(difference))

    def flight(self, tapes: str) -> Flight:
        """Return the messages in flight of a segment."""
        return self.segments.setdefault(tapes, defaultdict(deque))

    def memory(self, name: str, size: int) -> SharedMemory:
        """Return the segment with this name."""
        if name not in self._memory:
            self._memory[name] = SharedMemory.create(size)
        return self._memory[name]

    def give(self, key: tuple[str, int], place: int, given: Any, among: int, rule: Callable[..., Any]) -> None:
        """Take part in an exchange of `among` nodes, whose result is `rule` of what they give, in order of places."""
        met = self._met.setdefault(key, {})
        met[place] = given
        if len(met) == among:
            self._results[key] = rule([met[place] for place in range(among)]), among
            del self._met[key]

    def result(self, key: tuple[str, int], seat: Seat) -> Any:
        """Wait for the result of an exchange in which a node takes part."""
        self.wait(seat, lambda: key in self._results, "")
        result, left = self._results.pop(key)
        if left > 1:
            self._results[key] = result, left - 1
        return result


class Player(MessageSource):
    """A node's place in a replay in one process."""

    def __init__(self, stage: ReplayStage, seat: Seat):
        self._stage, self._seat, self._flight = stage, seat, stage.flight(seat.tapes)

    def message(self, entry: MessageEntry) -> Message:
        queue = self._flight[entry.source, self._seat.node]
        self._stage.wait(self._seat, lambda: bool(queue), f"message {entry.number} of {node_name(entry.source)}")
        self._stage.messages += 1
        return queue.popleft()

    def before_gradient(self, node: Node) -> None:
        stage = self._stage
        stage.wait(self._seat, lambda: stage.until is None or node.run_step < stage.until, PAUSED)

    def at_turn(self, node: Node, place: int) -> None:
        self._stage.nodes[self._seat.node] = node
        if self._stage.watched is not None:
            self._stage.watched(node, place)

    def differ(self, difference: Difference) -> Exception:
        return self._stage.differ(difference)

    def agree(self, agreement: Agreement | None) -> None:
        if agreement is None:
            self._stage.gradients += 1
        else:
            self._stage.agreements.append(agreement)


class ReplayBus:
    """Carries messages between the programs of a replay."""

    def __init__(self, flight: Flight, me: Address):
        self._flight, self._me = flight, me
        self.traffic = Traffic()

    copy_for_sending = staticmethod(frozen)

    def send(self, to: Address, message: Message) -> None:
        """Send a message, whose array may change afterwards."""
        array = None if message.array is None else frozen(message.array)
        self.traffic.sent(message.payload_bytes, 0)
        self._flight[self._me, to].append(msgspec.structs.replace(message, array=array))

    def later(self, seconds: float, message: Message) -> None:
        """Send a message of the node to itself, which enters when the tape says so."""
        self._flight[self._me, self._me].append(message)

    def reachable(self, peer: Address) -> bool:
        """Return true: messages to a node that has ended stay where they are."""
        return True

    def disconnect(self, peer: Address) -> None:
        """Do nothing, because there is no connection."""

    def broken(self, seconds: float) -> set[Address]:
        """Return the empty set: no connection breaks."""
        return set()

    def close(self, linger: float = 0.0) -> None:
        """Do nothing, because there is no connection."""


class ReplayGroup(SharedGroup):
    """A worker's place among workers that share memory, whose sums wait for the threads of the others."""

    def __init__(self, stage: ReplayStage, seat: Seat, segment: SharedMemory, place: tuple[int, int, int]):
        """`place`: rank, number of workers and room in the segment, as of `SharedGroup`."""
        super().__init__(segment, *place)
        self._stage, self._seat, self._calls = stage, seat, 0
        self._name = f"{segment.address} of {seat.tapes}"

    def _of_all(self, given: Any, rule: Callable[[list[Any]], R], meanwhile: Callable[[], None]) -> R:
        self._calls += 1
        key = self._name, self._calls
        self._stage.give(key, self.rank, given, self.workers, rule)
        meanwhile()  # messages that came while the run's worker waited
        return self._stage.result(key, self._seat)  # type: ignore[no-any-return]

    def all_reduce(self, array: FlatArray, meanwhile: Callable[[], None], divisor: int = 1) -> None:
        array[:] = self._of_all(array, partial(ring_sum, shares=self.workers, divisor=divisor), meanwhile)

    def reduce_scatter(self, array: FlatArray, shares: int, meanwhile: Callable[[], None]) -> None:
        total = self._of_all(array, partial(ring_sum, shares=shares, divisor=1), meanwhile)
        for part in slices(len(array), shares)[self.rank : self.rank + 1]:
            array[part] = total[part]

    def all_gather(self, array: FlatArray, shares: int, meanwhile: Callable[[], None]) -> None:
        array[:] = self._of_all(array, partial(_joined, shares=shares), meanwhile)

    def mean_of_part(self, array: FlatArray, into: FlatArray, meanwhile: Callable[[], None]) -> None:
        into[:] = self._of_all(array, _mean, meanwhile)[slices(len(array), self.workers)[self.rank]]

    def exchange_parts(self, part: FlatArray, into: FlatArray, meanwhile: Callable[[], None]) -> None:
        found = self._of_all(part, lambda parts: [one.copy() for one in parts], meanwhile)
        for rank, place in enumerate(slices(len(into), self.workers)):
            if rank != self.rank:
                into[place] = found[rank][: place.stop - place.start]


def ring_sum(arrays: Sequence[FlatArray], shares: int, divisor: int) -> FlatArray:
    """Return the sum of arrays (K,), in the order in which a ring all-reduce adds them, divided by `divisor`."""
    n, total = len(arrays), np.empty_like(arrays[0])
    for first, part in enumerate(slices(len(total), shares)):
        total[part] = arrays[first][part]
        for hop in range(1, n):
            total[part] += arrays[(first + hop) % n][part]
    if divisor != 1:
        total /= total.dtype.type(divisor)
    return total


def _mean(arrays: Sequence[FlatArray]) -> FlatArray:
    """Mean of arrays (K,), added in their order."""
    total = arrays[0].copy()
    for one in arrays[1:]:
        total += one
    total /= total.dtype.type(len(arrays))
    return total


def _joined(arrays: Sequence[FlatArray], shares: int) -> FlatArray:
    """Share i of array i, for each of the shares."""
    return np.concatenate([arrays[i][part] for i, part in enumerate(slices(len(arrays[0]), shares))])


class ReplayMember(Member):
    """The membership of a replayed node: what the supervisor and the others said comes from the tape."""

    def __init__(
        self, stage: ReplayStage, node_spec: NodeSpec, schema: Schema, largest: int, notes: Notes, sums: bool = False
    ):
        self.node_spec, self.schema, self.closed = node_spec, schema, False
        self._stage, self._folder = stage, Path(node_spec.directory)
        seat = Player(stage, Seat(node_spec.tapes, node_spec.address))
        self._follower = Follower(seat, tape_file(Path(node_spec.tapes), node_spec.address), self._said)
        header = self._follower.header
        self.tape = self._follower
        self.bus = ReplayBus(stage.flight(node_spec.tapes), node_spec.address)  # type: ignore[assignment]
        self.clock, self.view, self.hosts = ClockOffset(0.0, 0.0), View(header.epoch, header.ranks), header.hosts
        host = next((host for host in header.hosts if node_spec.address in host), ())
        group, shares = (header.ranks, True) if header.memory else (host, header.host_memory)
        self._group = f"{node_spec.tapes}/{group[0] if group else ''}"
        segment = stage.memory(self._group, needed(len(group), room_for(schema.nbytes))) if shares else None
        self.memory, self.host_memory = (segment, None) if header.memory else (None, segment)

    def _said(self, tag: str, note: Any) -> Any:
        """Copies of states for checkpoints go to the replay's own folder."""
        if tag == CHECKPOINT and note["do"] == "copy":
            (place := self._folder / Path(str(note["folder"])).name).mkdir(exist_ok=True)
            return {**note, "folder": str(place), "wait": 1}
        return note

    def join(
        self,
        strategy: str,
        optimizer: Any,
        initial: FlatArray | None,
        part: NodePart | None = None,
        repeats: bool = False,
    ) -> tuple[Cluster, FlatArray]:
        header, initial = self._follower.header, self._stage.initial if initial is None else initial
        assert initial is not None
        return Cluster(len(header.ranks), header.servers), initial

    def begin(self) -> None:
        """Do nothing, because a replay has no common start."""

    def expect(self, received: Mapping[Address, int]) -> None:
        """Do nothing, because messages carry their numbers."""

    def group(self, segment: SharedMemory, rank: int, workers: int) -> SharedGroup:
        room = room_for(self.schema.nbytes)
        seat = Seat(self.node_spec.tapes, self.node_spec.address)
        return ReplayGroup(self._stage, seat, segment, (rank, workers, room))

    def seconds(self) -> float:
        """Return the node's place on its tape, in seconds."""
        return self._follower.place * PLACE_SECONDS

    def tell(self, tag: str, array: FlatArray | None = None, note: Fields | None = None) -> None:
        if tag == "events" and array is not None and self._stage.heard is not None:
            for event in events_in(array):
                self._stage.heard(event)

    def send_in_parts(self, note: Fields, arrays: Sequence[FlatArray]) -> None:
        """Do nothing, because the tape compares what is evaluated."""

    def fail(self, failure: Failure) -> None:
        """Keep the reason, unless the replay itself has ended the program."""
        if failure.kind not in (TapeEnded.__name__, Unlike.__name__):
            self._stage.failures[self.node_spec.address] = failure.reason
            self._follower.fail(failure.reason)

    def receive(self, seconds: float | None, also: int | None = None, wanted: Wanted | None = None) -> Message | None:
        message = self._follower.next()
        if message is None and seconds != 0:
            raise self._follower.wait_in_vain("the end of the run" if wanted is None else str(wanted))
        return message

    def wait_for_again(self) -> BeginAgain:
        while (message := self._follower.next()) is not None:
            if message.tag == AGAIN and not (again := begin_again(message)).waits:
                return again
        raise self._follower.wait_in_vain("a place among other workers")

    def close(self, linger: float) -> None:
        self.closed = True

    leave = close  # type: ignore[assignment]
