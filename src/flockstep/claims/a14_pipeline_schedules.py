"""The bubble of a pipeline, and the micro-batches that its stages hold, from schedules on the event queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from flockstep.claims.base import Claim, ClaimRow, Say, Verdict
from flockstep.simulation.queue import EventQueue

STAGES, BATCHES = 4, (4, 8, 32)
FORWARD, BACKWARD = 1.0, 2.0
"""Seconds of a stage's forward and backward pass over a micro-batch; the share of the bubble does not
depend on them.
"""
MISSING = "missing"


@dataclass(frozen=True)
class PipelinePass:
    """One pass of a stage over a micro-batch."""

    kind: Literal["forward", "backward"]
    stage: int
    batch: int


PipelineSchedule = Callable[[int, int, int], list[PipelinePass]]
"""Function (stage, number of stages, number of micro-batches) → passes of that stage, in order."""


def gpipe(stage: int, stages: int, batches: int) -> list[PipelinePass]:
    """Return the passes of GPipe's schedule: all forward passes, then all backward passes (Huang et al. 2019)."""
    ahead = [PipelinePass("forward", stage, batch) for batch in range(batches)]
    return ahead + [PipelinePass("backward", stage, batch) for batch in range(batches)]


def one_forward_one_backward(stage: int, stages: int, batches: int) -> list[PipelinePass]:
    """Return the passes of the 1F1B schedule (Narayanan et al. 2019): one forward pass for each stage from this one to
    the last, then alternating backward and forward passes.
    """
    ahead = min(stages - stage, batches)
    order = [PipelinePass("forward", stage, batch) for batch in range(ahead)]
    for batch in range(batches):
        order.append(PipelinePass("backward", stage, batch))
        if ahead + batch < batches:
            order.append(PipelinePass("forward", stage, ahead + batch))
    return order


@dataclass
class Pipeline:
    """Stages that execute a schedule in virtual time; a pass begins when its inputs are available."""

    stages: int
    batches: int
    schedule: PipelineSchedule
    slowness: Sequence[float] = ()
    """Factor on the durations of each stage; empty if all stages are equally fast."""
    done: set[PipelinePass] = field(default_factory=set)
    busy: float = 0.0
    peaks: list[int] = field(default_factory=list)
    """Largest number of micro-batches whose activations a stage held at once, for each stage."""

    def run(self) -> float:
        """Execute the schedule; return the idle share of the stages' time."""
        queue: EventQueue[PipelinePass] = EventQueue()
        todo = [self.schedule(stage, self.stages, self.batches) for stage in range(self.stages)]
        held, working = [0] * self.stages, [False] * self.stages
        self.peaks = [0] * self.stages
        while True:
            for stage in range(self.stages):
                if not working[stage] and todo[stage] and self._ready(todo[stage][0]):
                    work, working[stage] = todo[stage].pop(0), True
                    held[stage] += work.kind == "forward"
                    self.peaks[stage] = max(self.peaks[stage], held[stage])
                    queue.schedule(queue.now + self._takes(work), work)
            if not queue:
                break
            _, ended = queue.pop()
            self.done.add(ended)
            self.busy += self._takes(ended)
            working[ended.stage] = False
            held[ended.stage] -= ended.kind == "backward"
        assert not any(todo), "deadlock: the passes of the schedule wait for each other"
        return 1 - self.busy / (self.stages * queue.now)

    def _ready(self, work: PipelinePass) -> bool:
        """Whether a pass's input is available: activations of the previous stage, or errors of the next stage."""
        if work.kind == "forward":
            return work.stage == 0 or PipelinePass("forward", work.stage - 1, work.batch) in self.done
        if work.stage == self.stages - 1:
            return PipelinePass("forward", work.stage, work.batch) in self.done
        return PipelinePass("backward", work.stage + 1, work.batch) in self.done

    def _takes(self, work: PipelinePass) -> float:
        return (FORWARD if work.kind == "forward" else BACKWARD) * (self.slowness[work.stage] if self.slowness else 1)


@dataclass(frozen=True)
class PipelineSchedules(Claim):
    """The idle share (bubble) of GPipe's schedule, and the activation memory of the 1F1B schedule."""

    statement = (
        "A pipeline of K stages and M micro-batches idles for (K - 1) / (M + K - 1) of its time; the stages of GPipe "
        "store M micro-batches at once, the stages of 1F1B K, K - 1, ..., 1"
    )
    source = "Huang et al. 2019 (GPipe), section 2.3; Narayanan et al. 2019 and 2021 (PipeDream, 1F1B with flushes)"
    setting = (
        f"{STAGES} stages, {', '.join(map(str, BATCHES))} micro-batches, forward pass {FORWARD:g} s and backward pass "
        f"{BACKWARD:g} s, free messages; both schedules executed on the event queue of virtual time"
    )
    tolerance = (
        "exact in virtual time, up to rounding; with one stage twice as slow the formula must not hold; with real "
        "stages within 10 %"
    )

    def check(self, say: Say) -> Verdict:
        rows = []
        for batches in BATCHES:
            formula = (STAGES - 1) / (batches + STAGES - 1)
            for name, schedule in (("GPipe", gpipe), ("1F1B", one_forward_one_backward)):
                pipeline = Pipeline(STAGES, batches, schedule)
                bubble = pipeline.run()
                peaks = [batches] * STAGES if schedule is gpipe else [min(STAGES - s, batches) for s in range(STAGES)]
                what = f"{name}, {batches} micro-batches"
                rows.append(
                    ClaimRow(f"{what}: bubble", round(formula, 4), round(bubble, 4), abs(bubble - formula) < 1e-12)
                )
                rows.append(ClaimRow(f"{what}: most held", str(peaks), str(pipeline.peaks), pipeline.peaks == peaks))
                say(f"{what}: bubble {bubble:.4f}, held {pipeline.peaks}")
        uneven = Pipeline(STAGES, 8, gpipe, (1, 2, 1, 1)).run()
        formula = (STAGES - 1) / (8 + STAGES - 1)
        wrong = abs(uneven - formula) > 0.1
        rows.append(
            ClaimRow("control: one stage twice as slow, 8 micro-batches", f"not {formula:.4f}", round(uneven, 4), wrong)
        )
        rows.append(ClaimRow("stages in separate real processes", "the same +-10 %", MISSING, False))
        reason = "flockstep does not split a model over processes yet, so no real stage can be timed"
        return Verdict(tuple(rows), reason)
