"""Claim: formulas give the idle share (bubble) of pipeline schedules, and the micro-batches that stages hold."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from flockstep.partitions.pipeline import Pipeline
from flockstep.partitions.pipeline_schedules import PipelinePass
from flockstep.records.events import Event, StepEvent
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict, near
from flockstep_lab.claims.real_run import events_of
from flockstep_lab.pipeline_timeline import idle_share, most_in_flight, timeline

STAGES, BATCHES = 4, (4, 8, 32)
FORWARD, INPUT, WEIGHT = 1.0, 1.0, 1.0
"""FORWARD: virtual seconds of a stage's forward pass over a micro-batch. INPUT: virtual seconds to compute the
gradient of its inputs. WEIGHT: virtual seconds to compute the gradient of its weights.
"""
CHUNKS = 2
"""Number of chunks of layers that each stage holds in the interleaved schedule."""
REAL = (("gpipe", 1), ("1f1b", 1), (f"interleaved({CHUNKS})", CHUNKS))
"""(Schedule, number of chunks of layers per stage) of the runs that are timed on real processes."""
REAL_BATCHES = 8
WARM_UP = 2
"""Number of steps at the start of a run that are not timed."""
JOB = """
import time

import numpy as np
import torch
from torch import nn

from flockstep import Data, Job

LAYERS, SLOW = {layers}, {slow}


class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, slope):
        time.sleep(2 * ctx.seconds)
        return slope, None


class Layer(nn.Linear):
    seconds = 0.0

    def forward(self, x):
        return Wait.apply(super().forward(x), self.seconds)


def model():
    layers = [Layer(4, 4) for _ in range(LAYERS)]
    for number, layer in enumerate(layers):
        layer.seconds = {seconds} * (2 if number in SLOW else 1)
    return nn.Sequential(*layers)


def loss(outputs, targets):
    return (outputs - targets).square().mean()


def job():
    x = np.ones((64, 4), np.float32)
    data = lambda: Data(x, x, x, x)
    return Job(model, data, "sgd(lr=0.001)", loss, lambda a, b: float(loss(a, b)), batch=16, name="waits")
"""
"""Text of a job file: a chain of layers whose passes sleep for a given time, so that stages do not compete for
cores.
"""
SECONDS = {
    "forward": FORWARD,
    "backward": INPUT + WEIGHT,
    "input_backward": INPUT,
    "weight_backward": WEIGHT,
    "update": 0.0,
}


@dataclass(frozen=True)
class PublishedSchedule:
    """Published figures of a schedule: idle seconds per stage and step, and the largest number of micro-batches that
    each stage holds at once.
    """

    schedule: str
    idle: float
    held: list[int]


def expected(batches: int) -> Iterator[PublishedSchedule]:
    """Yield the published figures of each schedule for steps of `batches` micro-batches."""
    last = STAGES - 1
    yield PublishedSchedule("gpipe", last * (FORWARD + INPUT + WEIGHT), [batches] * STAGES)
    one = [min(STAGES - stage, batches) for stage in range(STAGES)]
    yield PublishedSchedule("1f1b", last * (FORWARD + INPUT + WEIGHT), one)
    ahead = [2 * (last - stage) + (CHUNKS - 1) * STAGES + 1 for stage in range(STAGES)]
    held = [min(count, CHUNKS * batches) for count in ahead]
    yield PublishedSchedule(f"interleaved({CHUNKS})", last * (FORWARD + INPUT + WEIGHT) / CHUNKS, held)
    yield PublishedSchedule("zb_h1", last * (FORWARD + INPUT - WEIGHT), [min(STAGES, batches)] * STAGES)


@dataclass(frozen=True)
class PipelineSchedules(Claim):
    """Claim: the idle share (bubble) of pipeline schedules, and the number of micro-batches that each stage holds at
    once.
    """

    statement = (
        "A pipeline of K stages and M micro-batches idles for (K - 1) / (M + K - 1) of its time, v times less if v "
        "chunks are interleaved, and three times less with ZB-H1; the stages of GPipe store M micro-batches at once, "
        "the stages of 1F1B K, K - 1, ..., 1, those of ZB-H1 K"
    )
    source = (
        "Huang et al. 2019 (GPipe), section 2.3; Narayanan et al. 2019 and 2021 (PipeDream, 1F1B with flushes, "
        "interleaved 1F1B); Qi et al. 2024 (ZB-H1), section 2"
    )
    steps: int = 7
    """Number of steps of each run on real processes."""
    seconds: float = 0.15
    """Seconds that the forward pass of a stage takes on real processes; the backward pass takes twice as long."""
    setting = (
        f"{STAGES} stages, {', '.join(map(str, BATCHES))} micro-batches, forward pass {FORWARD:g} s, gradients of "
        f"inputs {INPUT:g} s and of weights {WEIGHT:g} s, messages that take no time; timelines of the schedules' "
        f"passes; {STAGES} real processes whose layers wait instead of computing, {REAL_BATCHES} micro-batches"
    )
    tolerance = (
        "exact in virtual time, up to rounding; idle shares of real processes within 10 %; control: with one stage "
        "twice as slow, the idle share must differ from the formula in virtual time and on real processes"
    )

    def check(self, say: Say) -> Verdict:
        """Compare the published figures with timelines computed from the schedules, then with runs on real
        processes.
        """
        return Verdict((*self.computed(say), *self._real(say)))

    def computed(self, say: Say) -> list[ClaimRow]:
        """Return the rows for timelines in which every pass takes exactly `FORWARD`, `INPUT` or `WEIGHT` seconds."""
        rows = []
        for batches in BATCHES:
            for one in expected(batches):
                pipeline = Pipeline.parse(f"pipeline({STAGES}, {one.schedule}, {batches})")
                times = timeline(pipeline, 1, partial(_seconds, pipeline))
                bubble, busy = idle_share(times), batches * (FORWARD + INPUT + WEIGHT)
                formula = one.idle / (one.idle + busy)
                peaks = [most_in_flight(passed.work for passed in stage) for stage in times]
                what = f"{one.schedule}, {batches} micro-batches"
                rows.append(
                    ClaimRow(f"{what}: bubble", round(formula, 4), round(bubble, 4), abs(bubble - formula) < 1e-12)
                )
                rows.append(ClaimRow(f"{what}: most held", str(one.held), str(peaks), peaks == one.held))
                say(f"{what}: bubble {bubble:.4f}, held {peaks}")
        gpipe = Pipeline.parse(f"pipeline({STAGES}, gpipe, 8)")
        slow = timeline(gpipe, 1, lambda stage, work: _seconds(gpipe, stage, work) * (1 + (stage == 1)))
        uneven, formula = idle_share(slow), (STAGES - 1) / (8 + STAGES - 1)
        wrong = abs(uneven - formula) > 0.1
        rows.append(
            ClaimRow(
                "control: bubble with one stage twice as slow, 8 micro-batches",
                f"not {formula:.4f}",
                round(uneven, 4),
                wrong,
            )
        )
        return rows

    def _real(self, say: Say) -> Iterator[ClaimRow]:
        """Yield the rows of stages in separate real processes."""
        for schedule, chunks in REAL:
            last = STAGES - 1
            formula = last / (chunks * REAL_BATCHES + last)
            found = self._timed(schedule, ())
            say(f"{schedule}, {REAL_BATCHES} micro-batches, real processes: bubble {found:.4f}")
            what = f"{schedule}, {REAL_BATCHES} micro-batches, real processes: bubble"
            yield near(what, round(formula, 4), round(found, 4), 0.1)
        formula, slow = (
            (STAGES - 1) / (REAL_BATCHES + STAGES - 1),
            self._timed("gpipe", tuple(range(CHUNKS, 2 * CHUNKS))),
        )
        what = f"control: bubble with one stage twice as slow, {REAL_BATCHES} micro-batches, real processes"
        yield ClaimRow(what, f"not {formula:.4f}", round(slow, 4), abs(slow / formula - 1) > 0.1)

    def _timed(self, schedule: str, slow: tuple[int, ...]) -> float:
        """Idle share of the stages of a real run; `slow`: numbers of the layers that take twice as long."""
        job = JOB.format(layers=STAGES * CHUNKS, slow=slow, seconds=self.seconds / CHUNKS)
        partition = f"pipeline({STAGES}, {schedule}, {REAL_BATCHES})"
        settings = {"partition": partition, "evaluate_every": self.steps, "threads": 1}
        return idle_share_of(events_of(job, "all_reduce", STAGES, self.steps, **settings))


def idle_share_of(events: Iterable[Event]) -> float:
    """Return the share of their time in which the stages do not compute, for the median step.

    The first `WARM_UP` steps are left out.
    """
    steps: dict[int, list[StepEvent]] = {}
    for event in events:
        if isinstance(event, StepEvent):
            steps.setdefault(event.rank, []).append(event)
    ordered = [sorted(found, key=lambda event: event.step) for found in steps.values()]
    shares: list[float] = []
    for before, step in pairwise(zip(*ordered, strict=True)):
        took = sum(event.seconds - earlier.seconds for event, earlier in zip(step, before, strict=True))
        shares.append(1 - sum(event.compute_seconds for event in step) / took)
    median: float = statistics.median(shares[WARM_UP - 1 :])
    return median


def _seconds(pipeline: Pipeline, stage: int, work: PipelinePass) -> float:
    return SECONDS[work.kind] / pipeline.schedule.chunks
