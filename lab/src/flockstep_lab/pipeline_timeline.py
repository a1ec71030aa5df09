"""Computes when the passes of a pipeline begin and end if each pass takes a known time, to find bubbles."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flockstep.errors import RunError
from flockstep.partitions.pipeline import Pipeline
from flockstep.partitions.pipeline_schedules import PipelinePass

Key = tuple[bool, int, int, int, int]
"""Identifies a pass: whether it is a forward pass, its stage, its chunk, its step and its micro-batch."""


@dataclass(frozen=True)
class PassTime:
    """A pass of a stage, with the seconds at which it begins and ends."""

    work: PipelinePass
    begin: float
    end: float


def timeline(
    pipeline: Pipeline, steps: int, seconds: Callable[[int, PipelinePass], float], latency: float = 0.0
) -> list[list[PassTime]]:
    """Return the passes of each stage over `steps` steps, with their times.

    A pass begins when the stage has ended its previous pass and the input has arrived.

    Args:
        pipeline: the pipeline.
        steps: number of steps.
        seconds: function (stage, pass) → duration of the pass.
        latency: seconds that an input takes from one stage to the next.

    Raises:
        RunError: passes wait for each other, so that the schedule cannot be executed.
    """
    schedule, stages = pipeline.schedule, pipeline.stages
    todo = [schedule.passes(stage, stages, pipeline.microbatches, steps) for stage in range(stages)]
    ahead = [next(passes, None) for passes in todo]
    done: list[list[PassTime]] = [[] for _ in range(stages)]
    ended: dict[Key, float] = {}
    moving = True
    while moving:
        moving = False
        for stage in range(stages):
            while (work := ahead[stage]) is not None and (
                ready := _ready(pipeline, work, stage, ended, latency)
            ) is not None:
                begin = max(ready, done[stage][-1].end if done[stage] else 0.0)
                end = begin + seconds(stage, work)
                done[stage].append(PassTime(work, begin, end))
                if work.kind in ("forward", "backward", "input_backward"):
                    ended[_key(work, stage, work.chunk)] = end
                ahead[stage], moving = next(todo[stage], None), True
    if any(work is not None for work in ahead):
        raise RunError(f"the passes of {schedule} wait for each other at {stages} stages; fix the schedule")
    return done


def idle_share(stages: Iterable[list[PassTime]]) -> float:
    """Return the bubble: the share of the stages' total time, until the last pass ends, in which stages compute
    nothing.
    """
    times = list(stages)
    busy = sum(one.end - one.begin for passes in times for one in passes)
    return 1 - busy / (len(times) * max(passes[-1].end for passes in times))


def most_in_flight(passes: Iterable[PipelinePass]) -> int:
    """Return the largest number of micro-batches of one chunk whose activations a stage stores at the same time."""
    held = most = 0
    for work in passes:
        held += (work.kind == "forward") - (work.kind in ("backward", "weight_backward"))
        most = max(most, held)
    return most


def most_versions(passes: Iterable[PipelinePass]) -> int:
    """Return the largest number of versions of its weights that a stage stores at the same time: the latest version,
    and earlier versions that later passes use.
    """
    works = list(passes)
    needed: set[int] = set()
    latest = most = sum(work.kind == "update" for work in works)
    most = 1
    for work in reversed(works):
        if work.kind == "update":
            latest -= 1
            needed = {version for version in needed if version <= latest}
        else:
            needed.add(work.version)
        most = max(most, len(needed | {latest}))
    return most


def _ready(pipeline: Pipeline, work: PipelinePass, stage: int, ended: dict[Key, float], latency: float) -> float | None:
    """Second at which the inputs of a pass have arrived; None if they have not been computed yet."""
    schedule, last = pipeline.schedule, pipeline.stages - 1
    source = schedule.source(work, stage, pipeline.stages)
    needs = [] if source is None else [(work.kind == "forward", *source, work.step, work.microbatch)]
    if source is None and work.kind in ("backward", "input_backward"):
        needs.append((True, stage, work.chunk, work.step, work.microbatch))
    if schedule.one_forward_at_a_time and work.kind == "forward" and stage == 0 and work.step > 0:
        needs.append((True, last, 0, work.step - 1, 0))
    if not all(need in ended for need in needs):
        return None
    return max((ended[need] + (latency if need[1] != stage else 0.0) for need in needs), default=0.0)


def _key(work: PipelinePass, stage: int, chunk: int) -> Key:
    return work.kind == "forward", stage, chunk, work.step, work.microbatch
