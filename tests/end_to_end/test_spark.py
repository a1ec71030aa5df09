"""Runs on Spark: a barrier stage over two executors, each of which trains on the rows of its own partition."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from flockstep.experiments.single import RunResult
from flockstep.frameworks.base import Data
from flockstep.optimizers.sgd import SGD
from flockstep.records.events import LostEvent, StepEvent
from flockstep.records.scratch import sweep
from flockstep.workloads.own_data import OwnData, digest_of
from flockstep.workloads.sampler import Sampler
from flockstep.workloads.softmax import Softmax
from support.processes import PATIENCE, content, wait_until
from support.spark_program import needs_spark, spark_program

pytestmark = [needs_spark, pytest.mark.timeout(600)]
LONG = 3 * PATIENCE
"""Seconds for a program whose session alone takes a minute on a busy machine."""
STEPS, SIZES = 40, (1000, 1000)
LEARNS = f"""
run = train(rows(*{SIZES}), "all_reduce", "", steps={STEPS})
print(json.dumps([run.summary.status, run.summary.workers]))
"""


def expected() -> np.ndarray:
    """Plain numpy: each worker draws batches of its own rows, and all step along the mean gradient."""
    from flockstep.frameworks.job import make_engine

    job = Softmax().job(1)
    engine, data = make_engine(job, 1), job.data()
    params, (first, second) = engine.initial(), SIZES
    parts = [np.arange(first), first + np.arange(second)]
    samplers = [Sampler(np.arange(len(part)), job.batch, 1, rank) for rank, part in enumerate(parts)]
    optimizer = SGD(lr=1.0)
    state, gradients = optimizer.init(params), np.zeros((2, len(params)), np.float32)
    assert isinstance(data, Data)
    for _ in range(STEPS):
        for rank, part in enumerate(parts):
            engine.gradient(params, part[samplers[rank].next()], gradients[rank])
        optimizer.step(params, gradients.sum(0) / np.float32(2), state, 1.0)
    return params


def test_two_partitions_train_as_two_workers_on_these_rows(tmp_path: Path) -> None:
    ended = spark_program(LEARNS, tmp_path / "run").end(LONG)
    assert ended.code == 0, ended.err
    assert json.loads(ended.out.splitlines()[-1]) == ["finished", 2]
    run = RunResult.read(tmp_path / "run")
    params, schema = run.parameters()
    assert schema.size == len(params)
    np.testing.assert_allclose(params, expected(), rtol=1e-4, atol=1e-6)
    assert run.summary.best_metric is not None
    assert run.summary.best_metric > 0.7, "it learns"
    assert {event.rank for event in run.events() if isinstance(event, StepEvent)} == {0, 1}
    assert run.config.facts["rows"] == "1000 1000"


MANY = """
import numpy as np
from pyspark.ml.linalg import Vectors

frame = session.createDataFrame([(*x, y) for x, y in pairs[:600]], [*(f"x{i}" for i in range(20)), "kind"])
names = [f"x{i}" for i in range(20)]
even = frame.repartition(2).sortWithinPartitions(*names)
held_out = session.createDataFrame([(*x, y) for x, y in pairs[600:700]], frame.schema)
runs = [train(even, "bsp", f"-columns-{i}", x=names, y="kind", test=held_out, steps=20) for i in range(2)]
assert runs[0].config.facts == runs[1].config.facts
assert (runs[0].parameters()[0] == runs[1].parameters()[0]).all(), "sorted rows give the same bits"
assert not even.rdd.is_cached

vectors = frame.rdd.map(lambda row: (Vectors.dense(row[:20]), row[20])).toDF(["features", "label"]).coalesce(2)
print("vectors", train(vectors, "local_sgd", "-vectors", steps=20).summary.status)
print("uneven", train(rows(300, 40), "gossip", "-uneven", epochs=2).config.steps)

def refused(given, strategy="bsp", **more):
    try:
        train(given, strategy, "-refused", steps=10, **more)
    except FlockstepError as error:
        print(f"{type(error).__name__}: {error}")
    else:
        raise AssertionError("not refused")

refused(rows(10, 0))
refused(rows(10, 10, 10))
refused(rows(10, 10), "gradient_coding(1)")
refused(session.sparkContext.parallelize([([1.0], 0), ([1.0, 2.0], 0)] * 2, 2))
refused(session.sparkContext.parallelize([([None], 0)] * 2, 2))
refused(frame, x="x1", y="kindd")
changing = session.sparkContext.parallelize(range(20), 2).map(lambda i: ([np.random.rand()] * 20, i % 10))
changing.cache = lambda: changing
refused(changing)
"""


@pytest.mark.full
def test_data_frames_vectors_uneven_partitions_and_what_is_refused(tmp_path: Path) -> None:
    ended = spark_program(MANY, tmp_path / "run").end(LONG)
    assert ended.code == 0, ended.err
    lines = [line for line in ended.out.splitlines() if line]
    assert lines[0] == "vectors finished"
    assert lines[1] == "uneven 22", "ceil(2 epochs × 340 rows / (2 workers × 16))"
    assert "partitions have 40 to 300 rows" in ended.err
    starts = (
        "ConfigurationError: partition 1 of 2 has no rows",
        "ConfigurationError: 3 partitions need 3 tasks at the same time, but the cluster runs only 2",
        "CompositionError: workers of gradient_coding",
        "ConfigurationError: partition 0: the inputs must have one shape",
        "ConfigurationError: partition 0: the inputs must be finite numbers",
        "UnknownName: no column of the DataFrame is called 'kindd'; did you mean 'kind'?",
        "RunError: the Spark stage failed: partition",
    )
    assert len(lines) == 2 + len(starts), lines
    for line, start in zip(lines[2:], starts, strict=True):
        assert line.startswith(start), line


LOSSES = """
for strategy in ("all_reduce", "gossip"):
    try:
        train(rows(1000, 1000), strategy, "-" + strategy, steps=1_000_000, evaluate_every=100_000)
    except FlockstepError as error:
        print(f"{strategy}: {error}", flush=True)
    except KeyboardInterrupt:
        print(f"{strategy}: interrupted", flush=True)
"""


@pytest.mark.full
def test_a_killed_worker_and_a_killed_executor(tmp_path: Path) -> None:
    """A worker's process is a lost worker, after which the strategy decides; an executor ends the stage."""
    run = spark_program(LOSSES, tmp_path / "run")

    def steps(strategy: str, rank: int) -> int:
        return content(tmp_path / f"run-{strategy}" / "events" / f"worker-{rank}.jsonl").count(b'"type":"step"')

    def wait_for(strategy: str) -> dict[str, int]:
        here = lambda: all(steps(strategy, rank) > 50 for rank in range(2)) or not run.going()
        wait_until(here, LONG, f"steps of {strategy}")
        assert run.going(), run.err
        return run.working()

    os.kill(wait_for("all_reduce")["worker-0"], signal.SIGKILL)
    os.kill(wait_for("gossip")["worker-1"], signal.SIGKILL)
    wait_until(lambda: "worker 1 was killed by SIGKILL" in run.err, LONG, "the loss")
    before = steps("gossip", 0)
    wait_until(lambda: steps("gossip", 0) > before + 50 or not run.going(), LONG, "steps of the other worker")
    assert run.going(), run.err
    executors = [pid for pid in run.processes() if b"CoarseGrainedExecutorBackend" in content(f"/proc/{pid}/cmdline")]
    os.kill(executors[0], signal.SIGKILL)
    wait_until(lambda: not run.going() and not run.processes(), LONG, "the end of all processes")
    sweep(run.scratch)  # as the next run does: Spark kills the tasks of a stage that fails
    ended = run.end(LONG)
    lines = ended.out.splitlines()
    assert lines[1].startswith("gossip: every worker was lost"), (lines, ended.err)
    assert lines[0].startswith("all_reduce: worker 0 was killed by SIGKILL"), (lines, ended.err)
    found = RunResult.read(tmp_path / "run-gossip")
    assert {event.node for event in found.events() if isinstance(event, LostEvent)} == {0, 1}
    assert found.summary.status == "failed"


def test_own_data_are_those_of_the_files(tmp_path: Path) -> None:
    from flockstep.workloads.own_data import write_samples

    x, y = np.arange(6.0).reshape(3, 2), np.arange(3)
    write_samples(tmp_path, x, y)
    own = OwnData(str(tmp_path), (3, 5), {"rows": "3 5"})
    job = own.job(Softmax().job(0))
    data = job.data()
    assert (data.train_x == x).all()
    assert (data.test_y == y).all()
    assert job.facts == own.facts
    assert [len(part) for part in own.parts] == [3, 5]
    assert digest_of(x, y) == digest_of(x.copy(), y.copy()) != digest_of(x[::-1], y)
