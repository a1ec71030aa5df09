"""Runs a split model in virtual time: one data-parallel group for each part, and the parts' messages between them.

Each group is a `Simulation` of the unchanged strategy on its part of the parameters. All groups share one event queue
and one network, so that activations compete with the strategy's messages for the links.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, repeat

import numpy as np

from flockstep.arrays.namespace import to_host
from flockstep.arrays.schema import FlatArray
from flockstep.messages import HEADER_BYTES, Address, Message, node_name
from flockstep.programs import GRADIENT, NeedGradient
from flockstep.records.events import Event
from flockstep.runtime.batched import ReplicaGradients
from flockstep.runtime.fault_injector import FaultInjector
from flockstep.runtime.node_metrics import Emit
from flockstep.runtime.part_group import PartGroup, by_worker, groups_of, tracked, with_addresses_of_run
from flockstep.runtime.plan import Plan, require_splittable, whole_cluster
from flockstep.runtime.runner import Runner
from flockstep.runtime.tracker import Tracker
from flockstep.runtime.virtual import Simulation, Surroundings, carry
from flockstep.simulation.collector import seldom
from flockstep.simulation.compute import ComputeModel
from flockstep.simulation.network import Fabric, Network
from flockstep.simulation.queue import EventQueue
from flockstep.split.parts import program_of
from flockstep.split.program import NeedPass, PartProgram, PartRun, PartRunner, require_plain
from flockstep.split.stages import HeldPart, SplitModel


class StepDurations:
    """Seconds of a gradient of the whole model, for each worker and step. One duration is drawn per step, as in an
    unsplit run; every pass takes a fraction of it.
    """

    def __init__(self, streams: Sequence[Iterator[float]]):
        """`streams`: the durations of each worker's gradients, in order of steps."""
        self._streams = streams
        self._known: list[list[float]] = [[] for _ in streams]

    def of(self, rank: int, step: int) -> float:
        """Return the duration of step number `step`, from 0, on worker `rank`."""
        known = self._known[rank]
        known += islice(self._streams[rank], max(0, step + 1 - len(known)))
        return known[step]


class PartGradients(ReplicaGradients):
    """The gradients that all replicas compute for one part."""

    def __init__(self, part: HeldPart, plan: Plan, dropped: Callable[[int], None]):
        """`dropped`: called with the replica whose part has been ended."""
        super().__init__(part, plan)
        self._dropped = dropped
        self.runners: list[PartRunner] = []
        """The runner of the part's program in each replica."""

    def ask(self, rank: int, need: NeedGradient) -> int:
        """Start a step of replica `rank` in this part; return the number of samples of the step."""
        self.runners[rank].request(self.params[rank])
        return self._plan.batch_at(self.nodes[rank].step)

    def keep(self, rank: int) -> None:
        """Do nothing, because a part keeps copies of the parameters that it uses."""

    def forget(self, rank: int) -> None:
        """End the part's program of replica `rank`, whose worker has died; a server, `rank` < 0, has none."""
        if rank >= 0:
            self.runners[rank].close()
            self._dropped(rank)

    def take(self, rank: int) -> FlatArray:
        return self.runners[rank].part.gradient


@dataclass(eq=False)
class PartSnapshots:
    """Joins the snapshots of the parts of each replica, and passes snapshots of whole models to the run's tracker."""

    tracker: Tracker
    groups: Sequence[PartGroup]
    _waiting: dict[tuple[float, int], dict[int, tuple[FlatArray, float, int, int]]] = field(default_factory=dict)
    """Tick and replica → part → parameters, second, step and bytes sent."""

    def add(self, part: int, tick: float, address: Address, params: FlatArray, t: float, step: int, sent: int) -> None:
        """Add the parameters of a node that belongs to the group of one part."""
        if address < 0:
            self.tracker.add(tick, self.groups[part].outside(address), params, t, step, sent)
            return
        known = self._waiting.setdefault((tick, address), {})
        known[part] = to_host(params).copy(), t, step, sent
        if len(known) < len(self.groups):
            return
        del self._waiting[tick, address]
        ordered = [known[one] for one in range(len(self.groups))]
        whole = np.concatenate([one[0] for one in ordered])
        self.tracker.add(
            tick, address, whole, max(one[1] for one in ordered), ordered[0][2], sum(one[3] for one in ordered)
        )


class SplitSimulation:
    """A run of a split model in virtual time."""

    def __init__(
        self,
        model: SplitModel,
        plan: Plan,
        compute: ComputeModel,
        network: Network,
        emit: Emit,
        progress: Callable[[int, float], None] | None = None,
    ):
        """Create the nodes of a run.

        `plan` is that of the data-parallel group of any part, with one worker for each replica; `compute` has the
        seconds of a gradient of the whole model, of which a pass takes its share; `network` joins all workers and
        servers; `emit` writes an event to the record; `progress` is called with the steps of all workers so far, and
        the virtual seconds.

        Raises:
            CompositionError: the strategy asks for gradients that the parts of a split model cannot compute.
        """
        require_splittable(plan)
        self.plan = plan
        self._progress, self._steps = progress, 0
        self.bytes_between_parts = 0
        """Payload bytes of all messages between the parts of replicas."""
        parts, replicas = model.partition.parts, plan.cluster.workers
        everyone = whole_cluster(plan.cluster, parts)
        self._queue: EventQueue[Callable[[], None]] = EventQueue()
        self._fabric: Fabric = network.start(everyone)
        self._faults = FaultInjector(plan.faults, everyone)
        self._durations = StepDurations(compute.streams(everyone.workers, plan.seed))
        self._clock = self._faults.clock(compute.clock([repeat(1.0)] * everyone.workers))
        self._fabric.handle_with(self._clock.handle)
        self._faults.narrow_at_start(self._fabric)
        self._running: dict[tuple[int, int], object] = {}
        """Part and replica → what identifies the latest schedule of the end of the part's running pass."""
        self.model = model
        facts = *tracked(plan, model.sizes), plan.samples_at, by_worker(emit, parts)
        self.tracker = Tracker(model.engine, plan.result, *facts)
        self._places = groups_of(model.sizes, plan.cluster.servers)
        snapshots = PartSnapshots(self.tracker, self._places)
        hosts = network.hosts(everyone.workers)
        self.groups: list[Simulation] = []
        self._gradients: list[PartGradients] = []
        for place, one in zip(self._places, model.parts, strict=True):
            gradients, part = PartGradients(one, plan, partial(self._drop, place.part)), place.part
            within = Surroundings(
                one,
                self._queue,
                self._fabric,
                partial(snapshots.add, part),
                self.tracker.lose,
                gradients,
                place.hosts(hosts),
                place.outside,
                partial(self._start, part),
            )

            def named(event: Event, place: PartGroup = place) -> None:
                emit(with_addresses_of_run(event, place))

            self.groups.append(Simulation(model.engine, plan, compute, network, named, self._stepped, within=within))
            gradients.runners.extend(self._part_runner(part, gradients, rank) for rank in range(replicas))
            self._gradients.append(gradients)

    @property
    def now(self) -> float:
        """Current virtual time in seconds."""
        return self._queue.now

    def run(self) -> None:
        """Run every program to its end; raise `Diverged` for an infinite loss, `RunError` for a deadlock."""
        with np.errstate(over="ignore", invalid="ignore"), seldom():
            for group in self.groups:
                group.begin()
            self._faults.schedule(self._queue, self._fabric, self._die, self._notice)
            self._queue.run()
            for group in self.groups:
                group.require_ended()
        self.tracker.close()

    def stop(self) -> None:
        """End every program at its current point, and write each node's totals."""
        for group in self.groups:
            group.stop()

    def close(self) -> None:
        """Break the references between the nodes, whose memory is then free; the simulation is over."""
        for group in self.groups:
            group.close()

    def program(self, part: int, replica: int) -> PartProgram:
        """Return the program of one part of one replica."""
        return self._gradients[part].runners[replica].part

    def _die(self, address: Address) -> None:
        """End the program of a node, and of its part, at its current point."""
        part, own = self._within(address)
        self.groups[part].die(own)

    def _notice(self, address: Address) -> None:
        """Notify the other nodes of a death; the other workers of a dead worker's replica leave with it."""
        part, own = self._within(address)
        self.groups[part].notice(own)
        if own < 0:
            return
        for group in self.groups:
            group.die(own)
            if group is not self.groups[part]:
                group.notice(own, f"{node_name(address)} of the same replica died")

    def _within(self, address: Address) -> tuple[int, Address]:
        """The part of a node of the run, and the node's address in the part's group."""
        found = ((place.part, place.inside(address)) for place in self._places)
        return next((part, own) for part, own in found if own is not None)

    def _part_runner(self, part: int, gradients: PartGradients, rank: int) -> PartRunner:
        batch = partial(gradients.batches[rank].next, GRADIENT)
        run = PartRun(rank, part, self.plan.steps, batch, partial(self._send, part, rank), self.plan.seed)
        begin, answer = partial(self._begin, part, rank), partial(self._answer, part, rank)
        return PartRunner(program_of(self.model, run), begin, answer)

    def _runner(self, part: int, rank: int) -> Runner:
        return self.groups[part].runners[rank]

    def _start(self, part: int, runner: Runner, need: NeedGradient) -> None:
        """Begin a worker's gradient, or give it the rest of the gradient that it has received a part of."""
        rank, gradients = runner.node.address, self._gradients[part]
        if runner.partly:
            self._queue.schedule(self.now, partial(self._answer_rest, part, rank))
            return
        require_plain(need, self.plan.strategy, self.model.partition)
        gradients.ask(rank, need)

    def _begin(self, part: int, rank: int, need: NeedPass) -> None:
        """Let the time of a pass go by."""
        self._runner(part, rank).lap("wait")
        stretch = need.share * need.samples / self.plan.batch
        worker = self.groups[part].address(rank)
        self._clock.begin(worker, self.now, self._durations.of(worker, need.step) * stretch)
        self._expect(part, rank)

    def _expect(self, part: int, rank: int) -> None:
        """Schedule the time at which the running pass of a part is complete."""
        due = self._clock.due(self.groups[part].address(rank), self.now)
        self._running[part, rank] = token = object()
        self._queue.schedule(max(self.now, due), partial(self._passed, part, rank, token))

    def _drop(self, part: int, rank: int) -> None:
        """Cancel the running pass of a part whose worker has died; the others have more of the cores."""
        self._running.pop((part, rank), None)
        self._clock.drop(self.groups[part].address(rank), self.now)
        if not self._clock.fixed:
            for other in list(self._running):
                self._expect(*other)

    def _passed(self, part: int, rank: int, token: object) -> None:
        """End the running pass of a part, if passes that began meanwhile have not slowed it down."""
        if self._running.get((part, rank)) is not token:  # its worker has died, or the end was scheduled again
            return
        if not self._clock.fixed and self._clock.due(self.groups[part].address(rank), self.now) > self.now:
            self._expect(part, rank)
            return
        del self._running[part, rank]
        self._runner(part, rank).lap("compute")
        self._gradients[part].runners[rank].passed()

    def _answer_rest(self, part: int, rank: int) -> None:
        """Give a worker the rest of the gradient that it has received a part of, unless it has died."""
        if not self._runner(part, rank).done:
            program = self.program(part, rank)
            self._answer(part, rank, program.gradient, program.loss)

    def _answer(self, part: int, rank: int, gradient: FlatArray, loss: float) -> None:
        self.groups[part].answer(rank, gradient, loss)

    def _send(self, part: int, rank: int, to: int, message: Message) -> None:
        """Send a message from one part of a replica to another over the network."""
        sender, receiver = self._runner(part, rank), self._runner(to, rank)
        nbytes = message.payload_bytes
        sender.metrics.traffic.sent(nbytes, HEADER_BYTES)
        self.bytes_between_parts += nbytes

        def arrive() -> None:
            if self._gradients[to].runners[rank].done:
                return
            receiver.metrics.traffic.received(nbytes)
            self._gradients[to].runners[rank].deliver(message)

        ends = self.groups[part].address(rank), self.groups[to].address(rank)
        carry(self._queue, self._fabric, *ends, HEADER_BYTES + nbytes, arrive)

    def _stepped(self, done: int, t: float) -> None:
        self._steps += 1
        if self._progress is not None:
            self._progress(self._steps, t)
