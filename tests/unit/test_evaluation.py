"""The process that evaluates: what it does of what waits when the run is over, and when its supervisor is gone."""

from __future__ import annotations

import pytest

from flockstep.launchers.evaluation import SnapshotEvaluation
from flockstep.records.snapshots import LAST, Snapshot
from support.jobs import run_of


class Noted:
    """A tracker that notes what it is asked to do."""

    def __init__(self) -> None:
        self.done: list[object] = []

    def add_snapshot(self, item: Snapshot) -> None:
        self.done.append(item.tick)

    def end(self) -> None:
        self.done.append("result")

    def close(self) -> None:
        self.done.append("end")


@pytest.mark.parametrize(
    ("ended", "done"), [(True, [1.0, 2.0, LAST, 3.0, None, "result", "end"]), (False, [LAST, None, "result"])]
)
def test_without_a_supervisor_only_the_result_is_settled(ended: bool, done: list[object]) -> None:
    tracker = Noted()
    evaluation = SnapshotEvaluation(lambda config: tracker, run_of(1))  # type: ignore[arg-type, return-value]
    rest = [Snapshot(tick, 0, "file", "float32", 1, 0, 0.0, 0, 0) for tick in (1.0, 2.0, LAST, 3.0, None)]
    evaluation.finish(rest, ended)
    assert evaluation.errors == []
    assert tracker.done == done
