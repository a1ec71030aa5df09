"""Observes runs in virtual time in which a worker dies, a message is lost or a worker is slow, and names the outcome.

Each function runs a strategy on `small_job` without and with the fault, checks that the fault occurred during the
training, and classifies the difference. The words are those of `flockstep_lab.failure_matrix`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flockstep.errors import PeerLost, ProtocolError, RunError
from flockstep.expression import fields_of, from_data, to_data
from flockstep.frameworks.base import Engine
from flockstep.messages import Address, Message, node_name
from flockstep.records.events import Event, LostEvent, PromotedEvent, StepEvent
from flockstep.runtime.plan import Plan
from flockstep.simulation.compute import ComputeModel
from flockstep.simulation.faults import Fault
from flockstep.simulation.network import Network
from flockstep.strategies.base import Strategy
from flockstep.testing.strategies import (
    GradientSource,
    Sent,
    SimulatedRun,
    Watched,
    equal_bits,
    run_strategy,
    small_job,
)

WORKERS, STEPS, FACTOR = 4, 24, 4.0
"""WORKERS: number of workers. STEPS: number of steps of each worker. FACTOR: factor by which a slow worker's gradients
take longer.
"""
VICTIM = 1
COMPUTE, NETWORK = "constant(1)", "link(bandwidth='1gbit', latency=0.01)"
"""Compute model and network in which all workers are equally fast and a gradient takes one second, so that every
difference is caused by the fault.
"""
DEATH, UNNOTICED = 6.505, 10.0
"""DEATH: virtual second at which the worker dies, in the middle of its seventh gradient. UNNOTICED: virtual seconds
until the other workers are notified.
"""
SLACK = 1.15
"""Largest ratio of two durations that still count as equal."""

ENDS = "the run ends with an error"
GOES_ON = "the other workers continue"
WAITS = "the other workers wait until the death is detected, then continue"
EXACT = "the other workers continue with the exact result"
STALLS = "all workers stall"
GROUP_STALLS = "the group stalls, the other workers continue"
ONE_STALLS = "one worker waits forever"
LATE_STALL = "no effect until the end, then one worker waits forever"
LATE_END = "no effect until the end, then the run ends with an error"
NO_SERVER = "no server"
SERVER_EXACT = "all workers wait until the death is detected, then continue with the exact result"
SERVER_WAITS = "all workers wait until the death is detected, then continue"
SERVER_FREE = "all workers continue"
NO_EFFECT = "no effect"
UPDATE_LOST = "one update is lost"
UPDATES_LOST = "all updates in the message are lost"
CONTENT_LOST = "the content of the message is lost"
NO_MESSAGES = "no messages"
FREE = "no effect on the other workers"
EVERYONE = "all workers slow down"
SPREADS = "the delay spreads from neighbor to neighbor until all workers slow down"
GROUP = "one group slows down, the other workers do not"
PARTLY = "the other workers slow down, but less than the slow worker"
EVERY_STEP = "at every step"
DRAINED = "after the last update"
COPIES = "copies of the server's parameters, taken at different times"
DRAWN = "only as lr → 0"
NEVER = "never"


class Faulted(Watched):
    """A simulation that stores the error that ended it, and every worker's parameters at each of its gradients."""

    def __init__(self, engine: Engine, plan: Plan, compute: ComputeModel, network: Network, faults: Sequence[Fault]):
        super().__init__(engine, plan, compute, network, faults)
        self.failure: RunError | None = None
        self.read: list[list[bytes]] = [[] for _ in range(plan.cluster.workers)]

    def note(self, event: Event) -> None:
        """Store an event, and the parameters of the worker that took a step."""
        super().note(event)
        if isinstance(event, StepEvent):
            self.read[event.rank].append(self.runners[event.rank].node.params.tobytes())

    def run(self, restarts: Sequence[float] = ()) -> None:
        """Run the simulation to its end or to the first error, which is stored."""
        try:
            super().run(restarts)
        except RunError as error:
            self.failure = error


@dataclass(frozen=True, eq=False)
class Observed(SimulatedRun):
    """A run on the small job, with the observations from which its outcome is classified."""

    simulation: Faulted

    @property
    def failure(self) -> RunError | None:
        """The error that ended the run early; None if there was none."""
        return self.simulation.failure

    def ends(self, rank: int) -> list[float]:
        """Return the virtual seconds at which the given worker ended each of its steps."""
        return [event.seconds for event in self.of(StepEvent) if event.rank == rank]

    def same_as(self, other: Observed, exact: bool, without: Sequence[int] = ()) -> bool:
        """Return whether all nodes except `without` ended with the same parameters, bit for bit (`exact`) or up to
        rounding.
        """
        pairs = [(self.params[a], other.params[a]) for a in self.params if a not in without]
        return all(equal_bits(a, b) if exact else np.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)


def observe(
    strategy: Strategy | str,
    workers: int = WORKERS,
    faults: Sequence[Fault | str] = (),
    compute: str = COMPUTE,
    rate: float = 0.1,
    replicas: np.ndarray | None = None,
) -> Observed:
    """Run a strategy on the small job; an error that ends the run is stored, not raised."""
    run = run_strategy(
        strategy, workers, STEPS, job=small_job(f"sgd(lr={rate})"), compute=compute, network=NETWORK,
        replicas=replicas, simulation=Faulted, faults=faults,
    )  # fmt: skip
    assert isinstance(run.simulation, Faulted)
    return Observed(run.simulation)


def replicas_equal(strategy: Strategy | str) -> str:
    """Return how often all workers hold the same parameters, such as "every 4 steps", with random gradient times."""
    run = observe(strategy, compute="exponential(1)")
    read = run.simulation.read
    together = [k for k in range(1, min(map(len, read))) if len({worker[k] for worker in read}) == 1]
    if together and together == list(range(together[0], min(map(len, read)), together[0])):
        return EVERY_STEP if together[0] == 1 else f"every {together[0]} steps"
    replicas = run.replicas
    if np.allclose(replicas, replicas[0], rtol=1e-5, atol=1e-6):
        return DRAINED
    apart = replicas[0] + np.random.default_rng(0).normal(size=replicas.shape).astype(replicas.dtype)
    still = observe(strategy, compute="exponential(1)", rate=0.0, replicas=apart).replicas
    if equal_bits(*still, GradientSource(WORKERS).start()):  # the workers' own parameters have no effect
        return COPIES if run.simulation.plan.cluster.servers else NEVER
    return DRAWN if _spread(still) < 0.9 * _spread(apart) else NEVER


def _spread(replicas: np.ndarray) -> float:
    """Root mean square distance of the rows from their mean."""
    return float(np.sqrt(np.mean(np.square(replicas - replicas.mean(0)))))


def dead_worker(strategy: Strategy | str, workers: int = WORKERS) -> str:
    """Return the words for what the other workers do when a worker dies.

    "up to b" is added if the outcome is worse after more than b deaths among n > b + 1 workers.
    """
    whole = observe(strategy, workers)
    words = [_after_deaths(strategy, whole, workers, count) for count in range(1, workers)]
    good = [word not in (ENDS, STALLS) for word in words]
    if not good[0] or (all(good) and len({*words} & {WAITS, GOES_ON, EXACT}) == 1):
        return words[0]
    up_to = next((i for i, word in enumerate(words) if word != words[0]), len(words))
    return f"{words[0]}, up to {up_to} of {workers}" if False in good else words[0]


def _after_deaths(strategy: Strategy | str, whole: Observed, workers: int, count: int) -> str:
    dead = range(VICTIM, VICTIM + count)
    run = observe(strategy, workers, [f"dies({rank % workers}, {DEATH}, noticed={UNNOTICED})" for rank in dead])
    ranks = [rank % workers for rank in dead]
    if isinstance(run.failure, PeerLost):
        said = [f"worker {rank} died" for rank in ranks] if count == 1 else ["died", "are lost"]
        assert any(words in str(run.failure) for words in said), run.failure
        return ENDS
    if run.failure is not None:
        return STALLS
    assert {event.node for event in run.of(LostEvent)} == set(ranks), "the deaths of the workers were never noticed"
    assert all(len(run.ends(rank)) < len(whole.ends(rank)) for rank in ranks), "no work was left when the worker died"
    others = [rank for rank in range(workers) if rank not in ranks]
    if run.same_as(whole, exact=False, without=ranks):
        return EXACT
    late = max(_longest_gap(run.ends(rank)) for rank in others)
    return WAITS if late > _longest_gap(whole.ends(others[0])) + UNNOTICED / 3 else GOES_ON


def dead_server(strategy: Strategy | str) -> str:
    """Return the words for what the workers do when a server dies that has a backup."""
    composed = Strategy.parse(strategy)
    if not composed.servers_for(WORKERS):
        return NO_SERVER
    if "replicas" not in fields_of(type(composed)):
        failure = observe(composed, faults=[f"dies(-1, {DEATH}, noticed={UNNOTICED})"]).failure
        assert isinstance(failure, PeerLost), failure
        return ENDS
    backed = from_data({**to_data(composed), "replicas": 1}, Strategy)  # type: ignore[type-abstract]
    whole, run = observe(backed), observe(backed, faults=[f"dies(-1, {DEATH}, noticed={UNNOTICED})"])
    assert run.failure is None, run.failure
    assert len(run.of(PromotedEvent)) == 1, "no backup took the place of the server"
    assert all(len(run.ends(rank)) == len(whole.ends(rank)) for rank in range(WORKERS)) or not (
        composed.traits.fixed_steps
    )
    if run.same_as(whole, exact=True, without=[-1]):
        return SERVER_EXACT
    late = max(_longest_gap(run.ends(rank)) for rank in range(WORKERS))
    return SERVER_WAITS if late > _longest_gap(whole.ends(0)) + UNNOTICED / 3 else SERVER_FREE


def _longest_gap(ends: Sequence[float]) -> float:
    return float(np.max(np.diff([0.0, *ends])))


def kinds(whole: Observed) -> dict[str, tuple[Address, Address, int]]:
    """Return, for each kind of message with an array, the source, the receiver, and the number of one message of the
    kind in the middle of the run.
    """
    found: dict[str, tuple[tuple[int, ...], tuple[Address, Address, int]]] = {}
    counts: dict[tuple[Address, Address], int] = {}
    for entry in whole.simulation.log:
        if not isinstance(entry, Sent) or entry.message.array is None:
            continue
        message, to = entry.message, entry.to
        link = message.source, to
        counts[link] = counts.get(link, 0) + 1
        order = (entry.t < whole.seconds / 3, message.source != VICTIM, to != VICTIM)
        kind = kind_of(message, to)
        if kind not in found or order < found[kind][0]:
            found[kind] = order, (*link, counts[link])
    return {kind: place for kind, (_, place) in found.items()}


def kind_of(message: Message, to: Address) -> str:
    """Return the name that the failure matrix uses for a message: its tag, without its channel."""
    name = message.tag.partition("/")[0]
    return f"reply to {name}" if message.reply_to else name


def lost_message(strategy: Strategy | str) -> str | dict[str, str]:
    """Return the words for what happens when one message with an array is lost; a dictionary by kind of message if the
    kinds differ.
    """
    whole = observe(strategy)
    words = {kind: _after_loss(strategy, whole, place) for kind, place in kinds(whole).items()}
    return words if len(set(words.values())) > 1 else next(iter(words.values()), NO_MESSAGES)


def _after_loss(strategy: Strategy | str, whole: Observed, place: tuple[Address, Address, int]) -> str:
    source, to, nth = place
    run = observe(strategy, faults=[f"drops({source}, {to}, {nth})"])
    log = [entry for entry in run.simulation.log if isinstance(entry, Sent)]
    on_link = [e for e in log if (e.message.source, e.to) == (source, to) and e.message.array is not None]
    assert len(on_link) >= nth, "the message that should be lost was never sent"
    short = [rank for rank in range(WORKERS) if len(run.ends(rank)) < len(whole.ends(rank))]
    if isinstance(run.failure, PeerLost | ProtocolError):
        assert node_name(source) in str(run.failure), run.failure
        return ENDS if short else LATE_END
    if run.failure is not None:
        return STALLS if len(short) == WORKERS else (LATE_STALL, ONE_STALLS, GROUP_STALLS)[min(len(short), 2)]
    missing = whole.deliveries()
    missing.subtract(run.deliveries())
    if run.same_as(whole, exact=True):
        return NO_EFFECT
    lost = sum(missing.values())
    return CONTENT_LOST if lost < 1 else UPDATE_LOST if lost == 1 else UPDATES_LOST


def slow_worker(strategy: Strategy | str) -> str:
    """Return the words for the effect of slow workers on the other workers; "up to b" is added if b slow workers have
    no effect.
    """
    whole = observe(strategy)
    hidden = 0
    while hidden + 1 < WORKERS and max(_delay(strategy, whole, hidden + 1)[0]) <= SLACK:
        hidden += 1
    if hidden:
        return FREE if hidden == WORKERS - 1 else f"no effect of up to {hidden} of {WORKERS} slow workers"
    paces, free = _delay(strategy, whole, 1)
    if max(paces) < FACTOR / SLACK:
        return PARTLY
    if min(paces) <= SLACK:
        return GROUP
    if min(free) < max(free):
        return SPREADS
    return EVERYONE if free[0] <= 2 else f"no effect for {free[0]} steps, then all workers slow down"


def _delay(strategy: Strategy | str, whole: Observed, count: int) -> tuple[list[float], list[int]]:
    """Slowdown of the second half of each other worker's steps, and the number of steps that each took undisturbed."""
    slow = [rank % WORKERS for rank in range(VICTIM, VICTIM + count)]
    run = observe(strategy, faults=[f"slows({rank}, {FACTOR})" for rank in slow])
    assert run.failure is None, run.failure
    others = [rank for rank in range(WORKERS) if rank not in slow]
    pace: list[float] = []
    free: list[int] = []
    for rank in others:
        before, after = whole.ends(rank), run.ends(rank)
        last = min(len(before), len(after)) - 1
        half = last // 2
        pace.append((after[last] - after[half]) / (before[last] - before[half]))
        free.append(next((k for k in range(last + 1) if after[k] > before[k] + (FACTOR - 1) / 2), last + 1))
    return pace, free
