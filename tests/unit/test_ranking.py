import random
from typing import Any

import msgspec
import pytest

from flockstep.errors import ConfigurationError
from flockstep.records import RunConfig, Summary, summarize
from flockstep.report.ranking import labels, rank

BASE = summarize(
    RunConfig(kind="train", job="digits", strategy="s", workers=4, metric="accuracy", target=0.95), [], "finished"
)


def made(strategy: str, time: float | None = None, final: float | None = 0.9, **more: Any) -> Summary:
    return msgspec.structs.replace(BASE, strategy=strategy, seconds_to_target=time, final_metric=final, **more)


def names(*summaries: Summary) -> list[str]:
    shuffled = list(summaries)
    random.Random(3).shuffle(shuffled)
    found = [summary.strategy for summary in rank(shuffled)]
    assert found == [summary.strategy for summary in rank(list(reversed(shuffled)))]
    return found


def test_reached_goes_before_not_reached_whatever_the_metric() -> None:
    assert names(made("never", None, 0.99), made("late", 9.0, 0.5), made("soon", 1.0, 0.4)) == ["soon", "late", "never"]


def test_then_the_final_metric_then_the_bytes() -> None:
    more = {"sent_bytes_per_worker": 5.0, "received_bytes_per_worker": 5.0}
    less = {"sent_bytes_per_worker": 7.0, "received_bytes_per_worker": 1.0}
    assert names(made("bad", None, 0.1), made("good", None, 0.2)) == ["good", "bad"]
    assert names(made("much", 1.0, 0.9, **more), made("little", 1.0, 0.9, **less)) == ["little", "much"]
    assert names(made("blind", None, None), made("seen", None, 0.0)) == ["seen", "blind"]


def test_lower_is_better_where_the_job_says_so() -> None:
    low = {"higher_is_better": False}
    assert names(made("high", None, 3.0, **low), made("low", None, 2.0, **low)) == ["low", "high"]


def test_a_failed_run_is_last_whatever_it_reached() -> None:
    assert names(made("failed", 0.5, 0.99, status="failed"), made("poor", None, 0.1)) == ["poor", "failed"]
    assert names(made("stopped", 0.5, 0.99, status="interrupted"), made("poor", None, 0.1)) == ["stopped", "poor"]


def test_time_zero_is_reached() -> None:
    assert names(made("at once", 0.0), made("never", None, 1.0)) == ["at once", "never"]


@pytest.mark.parametrize(
    ("field", "value", "plural"),
    [
        ("clock", "virtual", "clocks"),
        ("job", "charlm", "jobs"),
        ("target", 0.5, "targets"),
    ],
)
def test_what_does_not_compare_raises(field: str, value: Any, plural: str) -> None:
    with pytest.raises(ConfigurationError, match=f"different {plural} are not comparable"):
        rank([made("a"), made("b", **{field: value})])
    assert len(rank([made("a", **{field: value}), made("b", **{field: value})])) == 2


def test_labels_add_only_what_tells_runs_apart() -> None:
    assert labels([made("a"), made("b")]) == ["a", "b"]
    assert labels([made("a", seed=1), made("a", seed=2), made("b", seed=1)]) == ["a · seed 1", "a · seed 2", "b"]
    assert labels([made("a", network="1gbit"), made("a", network="10gbit")]) == [
        "a · network 1gbit",
        "a · network 10gbit",
    ]
    assert labels([made("a"), made("a")]) == ["a", "a · #2"]
    pairs = [made("a", workers=n, seed=s) for n in (4, 8) for s in (1, 2)]
    assert len(set(labels(pairs))) == 4
