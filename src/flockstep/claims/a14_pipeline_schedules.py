"""Claim: the idle share (bubble) of pipeline schedules, and the micro-batches that their stages hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from flockstep.claims.base import Claim, ClaimRow, Say, Verdict
from flockstep.partitions.pipeline import Pipeline
from flockstep.partitions.pipeline_schedules.base import PipelinePass
from flockstep.partitions.timeline import idle_share, most_in_flight, timeline

STAGES, BATCHES = 4, (4, 8, 32)
FORWARD, INPUT, WEIGHT = 1.0, 1.0, 1.0
"""Seconds of a stage's forward pass over a micro-batch, and of the gradients of its inputs and of its weights."""
CHUNKS = 2
"""Number of chunks of each stage of the interleaved schedule."""
MISSING = "missing"
SECONDS = {
    "forward": FORWARD,
    "backward": INPUT + WEIGHT,
    "input_backward": INPUT,
    "weight_backward": WEIGHT,
    "update": 0.0,
}


@dataclass(frozen=True)
class PublishedSchedule:
    """A schedule with its published idle seconds per stage and step, and micro-batches held by each stage."""

    schedule: str
    idle: float
    held: list[int]


def expected(batches: int) -> Iterator[PublishedSchedule]:
    """Yield the published figures of each schedule for steps of `batches` micro-batches."""
    last = STAGES - 1
    yield PublishedSchedule("gpipe", last * (FORWARD + INPUT + WEIGHT), [batches] * STAGES)
    one = [min(STAGES - stage, batches) for stage in range(STAGES)]
    yield PublishedSchedule("one_forward_one_backward", last * (FORWARD + INPUT + WEIGHT), one)
    ahead = [2 * (last - stage) + (CHUNKS - 1) * STAGES + 1 for stage in range(STAGES)]
    held = [min(count, CHUNKS * batches) for count in ahead]
    yield PublishedSchedule(f"interleaved({CHUNKS})", last * (FORWARD + INPUT + WEIGHT) / CHUNKS, held)
    yield PublishedSchedule("zb_h1", last * (FORWARD + INPUT - WEIGHT), [min(STAGES, batches)] * STAGES)


@dataclass(frozen=True)
class PipelineSchedules(Claim):
    """Claim: the idle share (bubble) of four synchronous schedules, and the micro-batches that their stages hold."""

    statement = (
        "A pipeline of K stages and M micro-batches idles for (K - 1) / (M + K - 1) of its time, v times less if v "
        "chunks are interleaved, and three times less with ZB-H1; the stages of GPipe store M micro-batches at once, "
        "the stages of 1F1B K, K - 1, ..., 1, those of ZB-H1 K"
    )
    source = (
        "Huang et al. 2019 (GPipe), section 2.3; Narayanan et al. 2019 and 2021 (PipeDream, 1F1B with flushes, "
        "interleaved 1F1B); Qi et al. 2024 (ZB-H1), section 2"
    )
    setting = (
        f"{STAGES} stages, {', '.join(map(str, BATCHES))} micro-batches, forward pass {FORWARD:g} s, gradients of "
        f"inputs {INPUT:g} s and of weights {WEIGHT:g} s, free messages; the passes of the schedules that run, timed"
    )
    tolerance = (
        "exact in virtual time, up to rounding; with one stage twice as slow the formula must not hold; with real "
        "stages within 10 %"
    )

    def check(self, say: Say) -> Verdict:
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
            ClaimRow("control: one stage twice as slow, 8 micro-batches", f"not {formula:.4f}", round(uneven, 4), wrong)
        )
        rows.append(ClaimRow("stages in separate real processes", "the same +-10 %", MISSING, False))
        reason = "flockstep does not split a model over processes yet, so no real stage can be timed"
        return Verdict(tuple(rows), reason)


def _seconds(pipeline: Pipeline, stage: int, work: PipelinePass) -> float:
    return SECONDS[work.kind] / pipeline.schedule.chunks
