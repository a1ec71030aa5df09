"""Pipeline schedules: each against its law from the paper, for any number of stages and micro-batches."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flockstep import registry
from flockstep.errors import ConfigurationError, RunError, UnknownName
from flockstep.partitions.base import Partition
from flockstep.partitions.pipeline import Pipeline
from flockstep.partitions.pipeline_schedules import FlushedSchedule, GPipe, OneForwardOneBackward, PipelinePass
from flockstep_lab.pipeline_timeline import PassTime, idle_share, most_in_flight, most_versions, timeline
from support.matrix import few

NAMES = registry.names("pipeline_schedule")
STAGES, BATCHES = st.integers(1, 6), st.integers(1, 12)
UNITS = {"forward": 1, "backward": 2, "input_backward": 1, "weight_backward": 1, "update": 0}


def pipeline_of(name: str, stages: int, batches: int) -> Pipeline:
    """A pipeline of the schedule `name`; the number of micro-batches is one that exists for the schedule."""
    if name in ("pipedream", "pipedream(True)", "ddg"):
        batches = 1
    elif name.startswith("interleaved"):
        batches = stages * (1 + batches % 3)
    elif name == "pipedream_2bw":
        batches += stages - 1
    return Pipeline.parse(f"pipeline({stages}, {name}, {batches})")


def timed(pipeline: Pipeline, steps: int = 1) -> list[list[PassTime]]:
    chunks = pipeline.schedule.chunks
    return timeline(pipeline, steps, lambda stage, work: UNITS[work.kind] / chunks)


def programs(pipeline: Pipeline, steps: int) -> list[list[PipelinePass]]:
    facts = pipeline.stages, pipeline.microbatches, steps
    return [list(pipeline.schedule.passes(stage, *facts)) for stage in range(pipeline.stages)]


@pytest.mark.parametrize("name", few([*NAMES, "interleaved(3)", "pipedream(True)"], *NAMES))
@settings(max_examples=30)
@given(stages=STAGES, batches=BATCHES)
def test_every_pass_happens_once_in_order_and_no_stage_waits_forever(name: str, stages: int, batches: int) -> None:
    pipeline, steps = pipeline_of(name, stages, batches), 3
    timed(pipeline, steps)  # raises if passes wait for each other
    each = {(step, one) for step in range(steps) for one in range(pipeline.microbatches)}
    for passes in programs(pipeline, steps):
        for chunk in range(pipeline.schedule.chunks):
            own = [work for work in passes if work.chunk == chunk and work.kind != "update"]
            order = [(work.step, work.microbatch) for work in own if work.kind == "forward"]
            assert order == sorted(each), "a stage receives what the stage before sends, in this order"
            backward = [work for work in own if work.kind != "forward"]
            halves = {work.kind for work in backward} != {"backward"}
            assert Counter((work.step, work.microbatch) for work in backward) == dict.fromkeys(each, 1 + halves)
        updates = [work.step for work in passes if work.kind == "update"]
        assert updates == list(range(steps))


@pytest.mark.parametrize("name", few([*NAMES, "interleaved(3)", "pipedream(True)"], *NAMES))
@settings(max_examples=30)
@given(stages=STAGES, batches=BATCHES)
def test_what_a_schedule_declares_is_what_its_passes_do(name: str, stages: int, batches: int) -> None:
    pipeline, steps = pipeline_of(name, stages, batches), 2 * stages + 3
    schedule = pipeline.schedule
    for stage, passes in enumerate(programs(pipeline, steps)):
        assert most_in_flight(passes) == schedule.in_flight(stage, stages, pipeline.microbatches)
        assert most_versions(passes) == schedule.versions(stage, stages)
        updates, delays, used = 0, set(), {}
        for work in passes:
            assert work.version <= updates, "a version that does not exist yet"
            if work.kind == "forward":
                used[work.step, work.microbatch, work.chunk] = work.version
            elif work.kind == "update":
                updates += 1
            else:
                assert used[work.step, work.microbatch, work.chunk] == work.version, "not the forward pass's weights"
                if stages <= work.step:
                    delays.add(work.step - work.version)
        assert delays == {schedule.delay(stage, stages)}
        assert schedule.synchronous == (not any(schedule.delay(s, 4) for s in range(4)))


@pytest.mark.oracle("pipeline_schedule:gpipe", "pipeline_schedule:1f1b")
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(stages=STAGES, batches=BATCHES)
def test_the_bubble_of_a_flush(name: str, stages: int, batches: int) -> None:
    """(K - 1) / (M + K - 1) of the time, whatever the ratio of the two passes (Huang et al. 2019, section 2.3)."""
    times = timed(pipeline_of(name, stages, batches))
    assert idle_share(times) == pytest.approx((stages - 1) / (batches + stages - 1))
    assert max(stage[-1].end for stage in times) == 3 * (batches + stages - 1)


@pytest.mark.oracle("pipeline_schedule:1f1b")
def test_1f1b_holds_fewer_micro_batches_than_gpipe() -> None:
    """min(K - s, M) at stage s instead of M; the figure of the paper for K = 4, pass by pass."""
    assert [most_in_flight(passes) for passes in programs(pipeline_of("1f1b", 4, 8), 1)] == [4, 3, 2, 1]
    assert [most_in_flight(passes) for passes in programs(pipeline_of("1f1b", 4, 2), 1)] == [2, 2, 2, 1]
    assert [most_in_flight(passes) for passes in programs(pipeline_of("gpipe", 4, 8), 1)] == [8, 8, 8, 8]
    words = [
        "".join(work.kind[0] + str(work.microbatch) for work in stage)
        for stage in programs(pipeline_of("1f1b", 3, 4), 1)
    ]
    assert words == ["f0f1f2b0f3b1b2b3u0", "f0f1b0f2b1f3b2b3u0", "f0b0f1b1f2b2f3b3u0"]


@pytest.mark.oracle("pipeline_schedule:interleaved")
@given(stages=st.integers(2, 5), groups=st.integers(1, 4), chunks=st.integers(2, 4))
def test_interleaving_divides_the_bubble(stages: int, groups: int, chunks: int) -> None:
    """(K - 1) / v passes of both kinds idle, relative to M that compute (Narayanan et al. 2021, section 2.2.2)."""
    pipeline = pipeline_of(f"interleaved({chunks})", stages, groups)
    idle = idle_share(timed(pipeline))
    assert idle / (1 - idle) == pytest.approx((stages - 1) / (chunks * pipeline.microbatches))
    for stage, passes in enumerate(programs(pipeline, 1)):
        first = [work.kind for work in passes].index("backward")
        warm_up = 2 * (stages - stage - 1) + (chunks - 1) * stages  # forward passes before the steady state
        assert first == min(warm_up + 1, chunks * pipeline.microbatches)


@pytest.mark.oracle("pipeline_schedule:zb_h1")
@given(stages=st.integers(2, 6), more=st.integers(0, 10))
def test_zero_bubble_idles_a_third_as_long_with_the_memory_of_1f1b(stages: int, more: int) -> None:
    """(K - 1) (F + B - W) idle seconds for each stage, with F = B = W = 1, and at most K micro-batches held (Qi et al.
    2024, table 2).
    """
    times = timed(pipeline_of("zb_h1", stages, stages + more))
    end = max(stage[-1].end for stage in times)
    assert end == 3 * (stages + more) + (stages - 1)
    first = most_in_flight(programs(pipeline_of("1f1b", stages, stages + more), 1)[0])
    assert {most_in_flight(one.work for one in stage) for stage in times} == {first}


@pytest.mark.oracle("pipeline_schedule:pipedream")
@given(stages=st.integers(1, 6))
def test_pipedream_updates_with_the_weights_of_its_forward_pass(stages: int) -> None:
    """w(t+1) = w(t) - η ∇f(w_1^(t-K+1), w_2^(t-K+2), ..., w_K^(t)) (Narayanan et al. 2019, section 3.3); with vertical
    synchronization every stage uses t - K + 1.
    """
    for stage, passes in enumerate(programs(pipeline_of("pipedream", stages, 1), 12)):
        used = {work.step: work.version for work in passes if work.kind == "backward"}
        assert used == {t: max(0, t - stages + 1 + stage) for t in range(12)}
    for passes in programs(pipeline_of("pipedream(vertical_sync=True)", stages, 1), 12):
        used = {work.step: work.version for work in passes if work.kind == "backward"}
        assert used == {t: max(0, t - stages + 1) for t in range(12)}


@pytest.mark.oracle("pipeline_schedule:pipedream_2bw")
@given(stages=st.integers(2, 6), more=st.integers(0, 5))
def test_2bw_holds_two_versions_and_is_one_update_late(stages: int, more: int) -> None:
    """w(t+1) = w(t) - η ∇f(w(t-1)) (Narayanan et al. 2021, section 3.1)."""
    for passes in programs(Pipeline.parse(f"pipeline({stages}, pipedream_2bw, {stages + more})"), 9):
        assert {work.step: work.version for work in passes if work.kind == "backward"} == {
            t: max(0, t - 1) for t in range(9)
        }
        assert most_versions(passes) == 2


@pytest.mark.oracle("pipeline_schedule:ddg")
@given(modules=st.integers(1, 6))
def test_the_delay_of_module_k_is_k_minus_k(modules: int) -> None:
    """Algorithm 1 of Huo et al. 2018, stepped by hand: in step t every module computes the forward pass of batch t,
    then module k the backward pass of batch t - K + k, none in its first K - k steps.
    """
    for stage, passes in enumerate(programs(pipeline_of("ddg", modules, 1), 10)):
        k, works = stage + 1, iter(passes)
        for t in range(10):
            assert (one := next(works)).kind == "forward"
            assert one.step == t
            if t >= modules - k:
                backward, update = next(works), next(works)
                assert (backward.kind, update.kind) == ("backward", "update")
                assert backward.step == update.step == t - modules + k
                assert backward.version == max(0, update.step - (modules - k))


@pytest.mark.negative_control("pipeline_schedule:ddg", "pipeline_schedule:pipedream", "pipeline_schedule:pipedream_2bw")
def test_only_ddg_waits_for_the_forward_pass_of_the_batch_before() -> None:
    """A step of DDG takes the forward pass through all K modules; without that wait it takes one module's work."""
    times = {name: timed(pipeline_of(name, 4, 1), 41) for name in ("ddg", "pipedream")}
    ends = {name: [one.end for one in each[3] if one.work.kind == "update"] for name, each in times.items()}
    assert {name: (end[40] - end[20]) / 20 for name, end in ends.items()} == {"ddg": 4, "pipedream": 3}
    synchronous = programs(pipeline_of("1f1b", 4, 8), 9)
    assert all(most_versions(passes) == 1 for passes in synchronous), "the delays above come from the schedules"


@pytest.mark.negative_control("pipeline_schedule:gpipe", "pipeline_schedule:1f1b")
def test_without_dependencies_there_is_no_bubble() -> None:
    """What makes the bubble is that stages wait for each other's outputs."""

    class Independent(GPipe):
        def source(self, work: PipelinePass, stage: int, stages: int) -> tuple[int, int] | None:
            return None

    assert idle_share(timed(Pipeline(4, Independent(), 8))) == pytest.approx(0)
    assert idle_share(timed(Pipeline(4, GPipe(), 8))) == pytest.approx(3 / 11)


@pytest.mark.negative_control("pipeline_schedule:zb_h1", "pipeline_schedule:interleaved")
def test_the_same_passes_in_another_order_idle_longer_or_never_end() -> None:
    """ZB-H1 whose gradients of weights wait for the end of the step; interleaving whose backward passes begin with the
    first chunk.
    """

    class Late(registry.load("pipeline_schedule", "zb_h1")):  # type: ignore[misc]
        def turns(self, stage: int, stages: int, microbatches: int) -> list[tuple[str, int, int]]:
            turns = super().turns(stage, stages, microbatches)
            return sorted(turns, key=lambda turn: turn[0] == "weight_backward")

    class Backwards(registry.load("pipeline_schedule", "interleaved")):  # type: ignore[misc]
        def turns(self, stage: int, stages: int, microbatches: int) -> list[tuple[str, int, int]]:
            turns = super().turns(stage, stages, microbatches)
            return [(kind, one, 1 - chunk if kind == "backward" else chunk) for kind, one, chunk in turns]

    assert most_in_flight(programs(Pipeline(4, Late(), 8), 1)[0]) == 8
    with pytest.raises(RunError, match="wait for each other at 4 stages"):
        timed(Pipeline(4, Backwards(), 8))


@pytest.mark.parametrize("name", ["1f1b", "pipedream", "pipedream(True)", "pipedream_2bw", "ddg"])
def test_one_stage_is_stochastic_gradient_descent(name: str) -> None:
    works = programs(pipeline_of(name, 1, 1), 5)[0]
    assert [(work.kind, work.step, work.version) for work in works] == [
        (kind, step, step) for step in range(5) for kind in ("forward", "backward", "update")
    ]


def test_a_link_delays_each_stage() -> None:
    times = timeline(Pipeline(3, GPipe(), 1), 1, lambda stage, work: UNITS[work.kind], latency=10)
    assert [[(one.begin, one.end) for one in stage[:2]] for stage in times] == [
        [(0, 1), (47, 49)], [(11, 12), (35, 37)], [(22, 23), (23, 25)]
    ]  # fmt: skip


def test_a_schedule_that_cannot_be_executed_is_refused() -> None:
    @dataclass(frozen=True)
    class Impatient(FlushedSchedule):
        def turns(self, stage: int, stages: int, microbatches: int) -> list[tuple[str, int, int]]:  # type: ignore[override]
            return [("backward", 0, 0), ("forward", 0, 0)]

        def in_flight(self, stage: int, stages: int, microbatches: int) -> int:
            return 1

    registry.register("pipeline_schedule", "impatient", Impatient)
    try:
        with pytest.raises(RunError, match="the passes of impatient wait for each other at 2 stages"):
            timed(Pipeline(2, Impatient(), 1))
    finally:
        registry._TABLE["pipeline_schedule"].pop("impatient")


def test_a_pipeline_is_written_as_its_papers_write_it() -> None:
    pipeline = Pipeline(4, OneForwardOneBackward(), 8)
    assert Partition.parse("pipeline(4, schedule=1f1b, microbatches=8)") == pipeline
    assert Partition.parse("pipeline(4, '1f1b', 8)") == Partition.parse(str(pipeline)) == pipeline
    with pytest.raises(UnknownName, match="no pipeline_schedule is called '2f2b'"):
        Partition.parse("pipeline(4, 2f2b, 8)")
    with pytest.raises(ConfigurationError, match="microbatches of pipeline must be a whole number, got '8x'"):
        Partition.parse("pipeline(4, 1f1b, 8x)")
