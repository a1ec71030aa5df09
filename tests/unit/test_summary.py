import math
import random
from dataclasses import replace

import msgspec
import pytest

from flockstep.cli.runs import missed
from flockstep.records import RunConfig, Summary, summarize
from flockstep.records.events import EvaluationEvent, Event, LostEvent, NodeEvent, SpanEvent, StepEvent, UpdateEvent

CONFIG = RunConfig(kind="train", job="digits", strategy="gossip", workers=3, metric="accuracy", target=0.9)


def step(t: float, rank: int, number: int, sent: int = 10) -> StepEvent:
    return StepEvent(t, rank, number, 0.5, 0.5, 0.25, 0.25, sent, 20, 1, 2)


def node(address: int, steps: int = 10, end: str = "same", compute: float = 1.0, wait: float = 1.0) -> NodeEvent:
    return NodeEvent(address, 5.0, steps, compute, wait, 2.0, 100, 200, 3, 4, 7 * 64, end)


def shot(
    t: float, metric: float, samples: int = 0, sent: float = 0.0, divergence: float | None = None
) -> EvaluationEvent:
    return EvaluationEvent(t, 1.0, samples, sent, 1 - metric, metric, divergence)


WORKERS: list[Event] = [node(0), node(1), node(2)]


def of(*events: Event, config: RunConfig = CONFIG) -> Summary:
    return summarize(config, events, "finished")


def test_nothing_on_the_record_is_no_figure() -> None:
    summary = summarize(CONFIG, [], "failed", "worker 1 died")
    assert (summary.status, summary.error, summary.clock, summary.seconds) == ("failed", "worker 1 died", "real", 0.0)
    for name in ("seconds_to_target", "final_metric", "best_metric", "staleness_mean", "utilization", "completeness"):
        assert getattr(summary, name) is None, name
    assert summary.replicas_agree is None
    assert summary.divergence is None
    assert summary.staleness_counts == {}


def test_the_target_is_reached_at_the_first_evaluation_that_is_good_enough() -> None:
    summary = of(shot(3.0, 0.95, 30, 300.0), shot(2.0, 0.9, 20, 200.0), shot(1.0, 0.899, 10, 100.0), shot(4.0, 0.8, 40))
    assert (summary.seconds_to_target, summary.samples_to_target, summary.bytes_to_target) == (2.0, 20, 200.0)
    assert (summary.final_metric, summary.best_metric) == (0.8, 0.95)
    assert summary.final_loss == pytest.approx(0.2)
    assert (summary.seconds, summary.samples) == (4.0, 40)


def test_a_target_never_reached_is_none() -> None:
    summary = of(shot(1.0, 0.899), shot(2.0, math.nan))
    assert summary.seconds_to_target is None
    assert summary.samples_to_target is None
    assert summary.bytes_to_target is None
    assert (summary.best_metric, summary.final_metric) == (0.899, None)


def test_a_failed_run_is_not_told_to_train_longer() -> None:
    summary = of(shot(1.0, 0.2))
    assert "did not reach the target 0.9: its best" in (missed(summary) or "")
    assert missed(msgspec.structs.replace(summary, status="failed")) is None


def test_without_a_target_nothing_is_reached() -> None:
    assert of(shot(1.0, 0.99), config=replace(CONFIG, target=None)).seconds_to_target is None


def test_lower_may_be_better() -> None:
    config = replace(CONFIG, higher_is_better=False, target=2.0, metric="perplexity")
    summary = of(shot(1.0, 9.0), shot(2.0, 1.5), shot(3.0, 1.8), config=config)
    assert (summary.seconds_to_target, summary.best_metric, summary.metric) == (2.0, 1.5, "perplexity")


def test_target_reached_at_time_zero_counts() -> None:
    assert of(shot(0.0, 0.95)).seconds_to_target == 0.0


def test_totals_come_from_the_nodes_and_not_twice() -> None:
    summary = of(step(1.0, 0, 1), node(0, compute=3.0), node(1), node(2))
    assert (summary.sent_bytes_per_worker, summary.received_bytes_per_worker) == (100, 200)
    assert summary.bytes_per_worker == 300
    assert (summary.messages_per_worker, summary.header_bytes_per_worker) == (7, 448)
    assert summary.utilization == pytest.approx((3 / 6 + 1 / 4 + 1 / 4) / 3)
    assert [(w.compute_seconds, w.wait_seconds, w.comm_seconds) for w in summary.per_worker] == [
        (3, 1, 2),
        (1, 1, 2),
        (1, 1, 2),
    ]


def test_servers_are_no_workers() -> None:
    assert of(*WORKERS) == replace_hashes(of(*WORKERS, node(-1, steps=0, end="other")), of(*WORKERS))


def replace_hashes(summary: Summary, other: Summary) -> Summary:
    return msgspec.structs.replace(summary, hashes=other.hashes)


def test_a_worker_that_died_is_counted_by_its_steps() -> None:
    summary = of(node(0), node(1), step(1.0, 2, 1), step(2.0, 2, 2, sent=30))
    dead = summary.per_worker[2]
    assert (dead.steps, dead.compute_seconds, dead.wait_seconds, dead.comm_seconds) == (2, 1.0, 0.5, 0.5)
    assert (dead.sent_bytes, dead.received_bytes, dead.messages_sent, dead.messages_received) == (40, 40, 2, 4)
    assert summary.sent_bytes_per_worker == pytest.approx((100 + 100 + 40) / 3)
    assert summary.replicas_agree is None
    assert summary.steps == 22


def test_utilization_leaves_out_workers_without_time() -> None:
    idle = NodeEvent(1, 5.0, 0, 0.0, 0.0, 0.0, 0, 0, 0, 0, 0, "same")
    assert of(node(0), idle, node(2)).utilization == 0.25


def test_staleness_is_weighted_by_the_number_of_updates() -> None:
    summary = of(UpdateEvent(1.0, -1, 0, 3, 0), UpdateEvent(2.0, -1, 1, 1, 4), UpdateEvent(3.0, -1, 2, 5, None))
    assert summary.staleness_mean == 1.0
    assert summary.staleness_max == 4
    assert summary.staleness_counts == {0: 3, 4: 1}


def test_a_round_counts_for_each_of_the_others() -> None:
    assert of(UpdateEvent(1.0, 0, None, 2, 0), UpdateEvent(2.0, 0, 1, 1, 5)).staleness_counts == {0: 4, 5: 1}
    assert of(UpdateEvent(1.0, -1, None, 2, 0)).staleness_counts == {0: 6}


def test_synchronous_rounds_are_complete() -> None:
    rounds: list[Event] = [UpdateEvent(1.0, rank, None, 10, 0) for rank in range(3)]
    summary = of(*WORKERS, *rounds)
    assert summary.completeness == 1.0
    assert [w.completeness for w in summary.per_worker] == [1.0, 1.0, 1.0]


def test_a_missing_round_is_not_complete() -> None:
    summary = of(*WORKERS, UpdateEvent(1.0, 0, None, 10, 0), UpdateEvent(1.0, 1, None, 9, 0))
    assert [w.completeness for w in summary.per_worker] == [1.0, 0.9, 0.0]
    assert summary.completeness == pytest.approx(38 / 60)


def test_completeness_counts_the_others_steps_only() -> None:
    events: list[Event] = [
        node(0, steps=10),
        node(1, steps=2),
        node(2, steps=4),
        UpdateEvent(1.0, 0, 1, 2, 1),
        UpdateEvent(1.0, 0, 0, 99, 0),
    ]
    summary = of(*events)
    assert [w.completeness for w in summary.per_worker] == [2 / 6, 0.0, 0.0]
    assert summary.completeness == 2 / (6 + 14 + 12)


def test_server_updates_are_a_share_of_all_steps_and_servers() -> None:
    servers: list[Event] = [node(-1, steps=0), node(-2, steps=0)]
    updates = [*(UpdateEvent(1.0, -1, rank, 10, 0) for rank in range(3)), UpdateEvent(1.0, -2, 0, 10, 0)]
    summary = of(*WORKERS, *servers, *updates)
    assert summary.completeness == pytest.approx(40 / 60)
    assert {w.completeness for w in summary.per_worker} == {summary.completeness}


def test_a_server_that_never_applied_anything_still_counts() -> None:
    updates = [UpdateEvent(1.0, -1, None, 10, 0)]
    assert of(*WORKERS, *updates).completeness == 1.0
    assert of(*WORKERS, node(-2, steps=0), *updates).completeness == 0.5


def test_completeness_above_one_shows() -> None:
    assert of(*WORKERS, UpdateEvent(1.0, -1, None, 20, 0)).completeness == 2.0


def test_one_worker_has_nobody_to_hear_from() -> None:
    summary = of(node(0), UpdateEvent(1.0, 0, None, 10, 0), config=replace(CONFIG, workers=1))
    assert summary.completeness is None
    assert summary.staleness_mean is None
    assert summary.replicas_agree is True


def test_agreement_is_equality_of_all_workers_hashes() -> None:
    assert of(*WORKERS).replicas_agree is True
    assert of(*WORKERS, node(-1, end="other")).replicas_agree is True
    assert of(node(0), node(1, end="other"), node(2)).replicas_agree is False
    assert of(node(0), node(1)).replicas_agree is None
    assert of(*WORKERS, node(-1, end="s")).hashes == {
        "worker 0": "same",
        "worker 1": "same",
        "worker 2": "same",
        "server 0": "s",
    }


def test_divergence_is_that_of_the_last_evaluation() -> None:
    assert of(shot(1.0, 0.5, divergence=3.0), shot(2.0, 0.5, divergence=1.0)).divergence == 1.0
    assert of(shot(1.0, 0.5, divergence=3.0), shot(2.0, 0.5)).divergence is None
    assert of(shot(2.0, 0.5), *WORKERS).divergence == 0.0
    assert of(shot(2.0, 0.5), node(0), node(1), node(2, end="other")).divergence is None


def test_a_lost_node_is_listed_once() -> None:
    summary = of(LostEvent(3.0, 1, "silent"), LostEvent(2.0, 1, "killed"), LostEvent(4.0, -1, "killed"))
    assert summary.lost == [LostEvent(2.0, 1, "killed"), LostEvent(4.0, -1, "killed")]


def test_seconds_are_those_of_the_last_event_whatever_it_is() -> None:
    assert of(step(1.0, 0, 1), SpanEvent(0, "wait", 0.0, 7.0)).seconds == 7.0


def test_the_order_of_events_does_not_matter_and_json_loses_nothing() -> None:
    events: list[Event] = [
        *WORKERS, node(-1), shot(1.0, 0.5), shot(2.0, 0.95, 5, 6.0, 0.25), UpdateEvent(1.5, -1, 1, 2, 3),
        LostEvent(4.0, 2, "x"),
    ]  # fmt: skip
    expected = of(*events)
    random.Random(0).shuffle(events)
    assert of(*events) == expected
    assert msgspec.json.decode(msgspec.json.encode(expected), type=Summary) == expected


def test_a_run_whose_workers_changed_has_no_share_of_applied_updates() -> None:
    """Workers count their steps anew: worker 0 goes back from step 4 to step 3, and worker 2 begins at step 3."""
    taken = [*((0, step) for step in (1, 2, 3, 4, 3)), *((1, step) for step in (1, 2, 3, 4, 3)), (2, 3)]
    steps = [StepEvent(0.1 * at, rank, number, 0.5, 0.1, 0, 0, 0, 0, 0, 0) for at, (rank, number) in enumerate(taken)]
    updates = [UpdateEvent(0.1 * at, rank, None, 1, 0) for at, (rank, _) in enumerate(taken)]
    config = RunConfig(kind="train", job="digits", strategy="all_reduce", workers=3)
    weighted = [UpdateEvent(0.1 * at, -1, rank, 1, 0, 1.0) for at, (rank, _) in enumerate(taken)]
    resized = summarize(config, [*steps, *updates, *weighted], "finished")
    assert (resized.completeness, resized.effective_rate) == (None, None)
    config = RunConfig(kind="train", job="digits", strategy="all_reduce", workers=2)
    assert summarize(config, [*steps[:4], *steps[5:9], *updates[:8]], "finished").completeness is not None
