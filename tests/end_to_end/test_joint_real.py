"""Replicas that PyTorch divides over real processes: bytes and times of virtual time, and the unsplit model's training
up to rounding.
"""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

import flockstep
from flockstep.errors import FlockstepError
from flockstep.partitions.base import Partition
from flockstep.records.events import EvaluationEvent, LostEvent, StepEvent
from flockstep.records.folder import RunFolder
from support import image_job, joint_frozen, joint_job, joint_jobs
from support.processes import RealRun

CHAIN, WORDS, IMAGES, FROZEN = (one.__file__ for one in (joint_job, joint_jobs, image_job, joint_frozen))
FULL = pytest.mark.full
DROPS = """
import sys
sys.path.insert(0, {tests!r})
from support.joint_jobs import language_model, words_of

def job():
    return words_of(language_model(dropout=0.3))
"""
PLAIN = """
import sys
sys.path.insert(0, {tests!r})
from support.joint_job import job
"""
WRONG = """
import sys
sys.path.insert(0, {tests!r})
import dataclasses
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
import support.compiler
from support.split_jobs import job_of

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Softmax(-1), nn.Linear(8, 1)).double()

def job():
    return dataclasses.replace(job_of(model), parallel_plan={{"0": ColwiseParallel(), "2": RowwiseParallel()}})
"""


RAISES = """
import sys
sys.path.insert(0, {tests!r})
import support.compiler
import torch.distributed as dist
from torch import nn
from support.split_jobs import job_of

class Fails(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += dist.is_initialized() and dist.get_backend() == "gloo"
        if self.calls > 3:
            raise ERROR("3 steps")
        return super().forward(x)

def job():
    return job_of(lambda: nn.Sequential(Fails(6, 8), nn.Linear(8, 1)).double())
"""


def written(folder: Path, text: str) -> str:
    (folder / "job.py").write_text(text.format(tests=str(Path(__file__).parents[1])))
    return str(folder / "job.py")


@pytest.mark.parametrize(
    ("job", "strategy", "partition", "workers"),
    [
        (FROZEN, "local_sgd(period=2)", "sharded(2)", 4),
        pytest.param(CHAIN, "local_sgd(period=2)", "sharded(2)", 4, marks=FULL),
        (WORDS, "all_reduce", "tensor(2)", 2),
        pytest.param(CHAIN, "ps(bsp, shards=2)", "sharded(3)", 6, marks=FULL),
        pytest.param(WORDS, "ps(bsp, shards=2)", "tensor(2)", 4, marks=FULL),
        pytest.param(WORDS, "local_sgd(period=2)", "tensor(4)", 4, marks=FULL),
        pytest.param(IMAGES, "all_reduce", "tensor(2, convolutions=divided)", 4, marks=FULL),
    ],
)
def test_processes_train_the_divided_model(
    tmp_path: Path, job: str, strategy: str, partition: str, workers: int
) -> None:
    facts = {"steps": 6, "evaluate_every": 2}
    real = flockstep.run(
        job, strategy, partition=partition, workers=workers, out=tmp_path / "real", transport="ipc", **facts
    ).summary
    virtual = flockstep.simulate(
        job, strategy, partition=partition, workers=workers, out=tmp_path / "virtual", **facts
    ).summary
    replicas = workers // Partition.parse(partition).parts
    flockstep.simulate(job, strategy, workers=replicas, out=tmp_path / "whole", **facts)
    models = [RunFolder(tmp_path / name).read_result() for name in ("real", "virtual", "whole")]
    np.testing.assert_allclose(models[0][0], models[2][0], rtol=0, atol=1e-12)
    assert models[0][1] == models[1][1] == models[2][1], "the saved model is the unsplit model"
    tests = [
        [e.loss for e in sorted(RunFolder(tmp_path / name).read_events(), key=str) if isinstance(e, EvaluationEvent)]
        for name in ("real", "virtual", "whole")
    ]
    assert sorted(tests[0]) == pytest.approx(sorted(tests[2]), rel=1e-11)
    sent = [[one.sent_bytes for one in summary.per_worker] for summary in (real, virtual)]
    assert sent[0] == (sent[1] if "3" not in partition else pytest.approx(sent[1], rel=2e-3)), "3 divides few arrays"


def test_all_processes_of_a_replica_have_the_loss_of_its_batch_with_dropout(tmp_path: Path) -> None:
    """Only if what they compute alike drops the same units."""
    job = written(tmp_path, DROPS)
    flockstep.run(job, "all_reduce", partition="tensor(2)", workers=2, steps=5, out=tmp_path / "run", transport="ipc")
    events = [e for e in RunFolder(tmp_path / "run").read_events() if isinstance(e, StepEvent)]
    losses = {rank: [e.loss for e in sorted(events, key=lambda e: e.step) if e.rank == rank] for rank in (0, 1)}
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 5


def test_a_plan_that_computes_another_model_is_refused(tmp_path: Path) -> None:
    """A softmax over the features of one process only."""
    with pytest.raises(FlockstepError, match=r"must compute what the model computes, got a loss of .* parallel_plan"):
        flockstep.run(
            written(tmp_path, WRONG), "all_reduce", partition="tensor(2)", workers=2, steps=2, out=tmp_path / "r"
        )


@FULL
@pytest.mark.parametrize(("error", "said"), [("SystemExit", "3 steps"), ("RuntimeError", "RuntimeError: 3 steps")])
def test_what_a_model_raises_ends_the_run(tmp_path: Path, error: str, said: str) -> None:
    """Not taken for the loss of another process."""
    words = ["train", written(tmp_path, RAISES.replace("ERROR", error)), "-s", "all_reduce", "-n", "2"]
    ended = RealRun([*words, "--partition", "sharded(2)", "--steps", "9"], tmp_path / "run", torch=True).end()
    assert ended.code
    assert said in ended.err, ended.err
    assert "are gone" not in ended.err


def test_a_replica_whose_process_dies_leaves_the_run(tmp_path: Path) -> None:
    words = [
        "train",
        written(tmp_path, PLAIN),
        "-s",
        "gossip",
        "--partition",
        "sharded(2)",
        "-n",
        "6",
        "--steps",
        "400",
    ]
    run = RealRun(words, tmp_path / "run", torch=True)
    run.wait_for_work()
    run.fault(signal.SIGKILL, "worker-2")
    ended = run.end()
    assert ended.code == 0, ended.err
    lost = {e.node for e in RunFolder(tmp_path / "run").read_events() if isinstance(e, LostEvent)}
    assert lost == {2, 3}


def test_a_replica_whose_process_dies_ends_a_run_that_needs_it(tmp_path: Path) -> None:
    run = RealRun(
        [
            "train",
            written(tmp_path, PLAIN),
            "-s",
            "all_reduce",
            "--partition",
            "sharded(2)",
            "-n",
            "4",
            "--steps",
            "400",
        ],
        tmp_path / "run",
        torch=True,
    )
    run.wait_for_work()
    run.fault(signal.SIGKILL, "worker-2")
    ended = run.end()
    assert ended.code == 1
    assert "worker 2 was killed" in ended.err.splitlines()[-1], ended.err
