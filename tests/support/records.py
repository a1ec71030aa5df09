"""Records such as runs might leave, invented: what reports are tested on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from flockstep.records import RunConfig, summarize
from flockstep.records.events import EvaluationEvent, Event, LostEvent, NodeEvent, SpanEvent, StepEvent, UpdateEvent
from flockstep.records.folder import Record
from flockstep.records.summary import Status

KB = 150
STEPS = 250


@dataclass(frozen=True)
class Made:
    """Behavior of one invented strategy."""

    strategy: str
    comm: float
    """Seconds of transfer an exchange."""
    period: int = 1
    barrier: bool = True
    server: bool = False
    late: int = 0
    efficiency: float = 1.0
    """Worth of a sample, against synchronous training."""
    apart: float = 0.0
    complete: float = 1.0
    kb: float = KB
    status: Status = "finished"


RUNS = (
    Made("all_reduce", 0.012),
    Made("bsp", 0.03, server=True),
    Made("ps(consistency=ssp(3))", 0.02, barrier=False, server=True, late=5, efficiency=0.95),
    Made("asgd", 0.018, barrier=False, server=True, late=8, efficiency=0.85),
    Made("local_sgd(period=8)", 0.012, period=8, efficiency=0.97, kb=KB / 8),
    Made("easgd(period=10, alpha=0.1)", 0.01, 10, barrier=False, server=True, efficiency=0.8, apart=0.6, kb=30.0),
    Made("gossip", 0.004, barrier=False, efficiency=0.75, late=4, apart=0.9, complete=0.4, kb=KB / 3),
    Made("partial(share=0.5)", 0.006, barrier=False, late=6, efficiency=0.4, apart=2.0, complete=0.5, status="failed"),
)  # fmt: skip


def invent(made: Made, seed: int = 0, kind: str = "simulate", workers: int = 4, target: float | None = 0.95) -> Record:
    """A record such as a run of `made` might leave."""
    config = RunConfig(
        kind=kind,  # type: ignore[arg-type]
        job="digits",
        strategy=made.strategy,
        workers=workers,
        seed=1,
        batch=32,
        epochs=20.0,
        metric="accuracy",
        target=target,
        network="100mbit" if kind == "simulate" else None,
        compute="lognormal(0.005, 0.3)" if kind == "simulate" else None,
        transport="ipc" if kind == "train" else None,
        versions={"flockstep": "0.1.0", "torch": "2.5.1"},
    )
    steps = STEPS // 2 if made.status == "failed" else STEPS
    events, clocks = activities(made, np.random.default_rng(seed), workers, steps)
    events += evaluations(made, clocks, workers, steps)
    end = float(clocks.max()) * 1.001
    same = made.barrier or (made.server and not made.apart)
    amounts = totals(events, workers)
    for rank in range(workers):
        compute, comm, wait = amounts[rank]
        nbytes = int(steps * made.kb * 1000)
        digest = "a1" if same else f"b{rank}"
        events.append(
            NodeEvent(rank, end, steps, compute, wait, comm, nbytes, nbytes, steps, steps, 128 * steps, digest)
        )
    if made.status == "failed":
        events.append(LostEvent(end, 2, "no heartbeat for 5 s"))
        return Record(
            config, summarize(config, events, made.status, "loss of worker 2 at step 125 is not finite"), events
        )
    return Record(config, summarize(config, events, made.status), events)


def activities(made: Made, random: Any, workers: int, steps: int) -> tuple[list[Event], Any]:
    """Steps, spans and updates; and when each worker completed each step, (steps, workers)."""
    events: list[Event] = []
    clock, done = np.zeros(workers), np.zeros((steps, workers))
    speed = np.ones(workers)
    speed[-1] = 1.4
    for number in range(steps):
        start, compute = clock.copy(), 0.005 * speed * random.lognormal(0, 0.3, workers)
        exchange = made.comm * (number % made.period == 0)
        comm = np.full(workers, exchange) * random.uniform(0.9, 1.1, workers)
        clock = clock + compute + comm
        wait = np.zeros(workers)
        if made.barrier and exchange:
            wait, clock = clock.max() - clock, np.full(workers, clock.max())
        for rank in range(workers):
            t, a, b = float(clock[rank]), float(start[rank]), float(start[rank] + compute[rank])
            sent = int(made.kb * 1000)
            took = (float(compute[rank]), float(wait[rank]), float(comm[rank]))
            events.append(StepEvent(t, rank, number + 1, 0.5, *took, sent, sent, 1, 1))
            if number < 8:
                c = b + took[2]
                spans = [("compute", a, b), ("comm", b, c), ("wait", c, t)]
                events += [SpanEvent(rank, what, x, y) for what, x, y in spans if y > x]
                if made.server and exchange:
                    events.append(SpanEvent(-1, "compute", c - 0.001, c))
            events += updates(made, random, rank, t, workers)
        done[number] = clock
    return events, done


def updates(made: Made, random: Any, rank: int, t: float, workers: int) -> list[Event]:
    if made.server:
        return [UpdateEvent(t, -1, rank, 1, int(random.binomial(made.late, 0.4)) if made.late else 0)]
    if made.barrier:
        return [UpdateEvent(t, rank, None, 1, 0)]
    if random.random() < made.complete:
        return [UpdateEvent(t, rank, (rank + 1) % workers, workers - 1, int(random.binomial(made.late, 0.5)))]
    return []


def evaluations(made: Made, done: Any, workers: int, steps: int) -> list[Event]:
    found: list[Event] = []
    for number in range(0, steps + 1, 10):
        worth = number / STEPS * made.efficiency
        accuracy = 0.1 + 0.88 * (1 - math.exp(-6.5 * worth))
        t = float(done[number - 1].mean()) if number else 0.0
        sent = number * made.kb * 1000
        apart = made.apart * math.exp(-worth) if number else 0.0
        loss = 2.3 * math.exp(-4 * worth) + 0.06
        found.append(EvaluationEvent(t, number, number * workers * 32, sent, loss, accuracy, apart))
    return found


def totals(events: list[Event], workers: int) -> list[tuple[float, float, float]]:
    steps = [event for event in events if isinstance(event, StepEvent)]
    mine = [[step for step in steps if step.rank == rank] for rank in range(workers)]
    return [
        (sum(s.compute_seconds for s in m), sum(s.comm_seconds for s in m), sum(s.wait_seconds for s in m))
        for m in mine
    ]
