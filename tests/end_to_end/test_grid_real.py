"""Models split over real processes: the same bits as in virtual time, and the unsplit model up to rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import flockstep
from flockstep.partitions.base import Partition
from flockstep.records.events import EvaluationEvent, StepEvent
from flockstep.records.folder import RunFolder
from support import grid_jobs, tied_job

TIED, PLANES = tied_job.__file__, grid_jobs.__file__
FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("job", "strategy", "partition", "workers"),
    [
        (TIED, "all_reduce", "pipeline(2, 1f1b, 3)", 2),
        pytest.param(PLANES, "all_reduce", "grid(1, 2)", 2, marks=FULL),
        pytest.param(PLANES, "local_sgd(period=2)", "grid(2, 2)", 4, marks=FULL),
        pytest.param(PLANES, "ps(bsp, shards=2)", "grid(2, 1)", 4, marks=FULL),
        pytest.param(TIED, "all_reduce", "pipeline(2, 1f1b, 3)", 4, marks=FULL),
    ],
)
def test_processes_compute_tied_stages_and_rectangles(
    tmp_path: Path, job: str, strategy: str, partition: str, workers: int
) -> None:
    """At every push one replica for each kind of part; `test_split_models_real.py` has two, and servers."""
    facts = {"steps": 6, "evaluate_every": 2}
    real = flockstep.run(
        job, strategy, partition=partition, workers=workers, out=tmp_path / "real", transport="ipc", **facts
    ).summary
    virtual = flockstep.simulate(
        job, strategy, partition=partition, workers=workers, out=tmp_path / "virtual", **facts
    ).summary
    flockstep.simulate(
        job, strategy, workers=workers // Partition.parse(partition).parts, out=tmp_path / "whole", **facts
    )
    assert real.hashes == virtual.hashes, "every worker and server ends with the same bits"
    models = [RunFolder(tmp_path / name).read_result() for name in ("real", "virtual", "whole")]
    assert models[0][0].tobytes() == models[1][0].tobytes()
    np.testing.assert_allclose(models[0][0], models[2][0], rtol=0, atol=1e-12)
    assert models[0][1] == models[1][1] == models[2][1], "the saved model is the unsplit model"
    events = {name: RunFolder(tmp_path / name).read_events() for name in ("real", "virtual", "whole")}
    losses = [
        {(e.rank, e.step): e.loss for e in events[name] if isinstance(e, StepEvent)} for name in ("real", "virtual")
    ]
    assert losses[0] == losses[1]
    tests = [
        sorted((e.step, e.loss) for e in events[name] if isinstance(e, EvaluationEvent))
        for name in ("real", "virtual", "whole")
    ]
    assert tests[0] == tests[1]
    assert [loss for _, loss in tests[0]] == pytest.approx([loss for _, loss in tests[2]], rel=1e-11)
    assert [one.sent_bytes for one in real.per_worker] == [one.sent_bytes for one in virtual.per_worker]
