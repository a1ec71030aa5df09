"""Split models on real processes: the same bits as in virtual time, and the unsplit model up to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flockstep
from flockstep.errors import FlockstepError
from flockstep.records.events import EvaluationEvent, StepEvent
from flockstep.records.folder import RunFolder
from flockstep.records.summary import Summary
from support import shuffled_job, split_job, split_jobs

CHAIN, NORMS = split_jobs.__file__, split_job.__file__
FULL = pytest.mark.full


def trained(job: str, strategy: str, partition: str | None, out: Path, workers: int, steps: int = 6) -> Summary:
    given = {"workers": workers, "steps": steps, "evaluate_every": 2, "out": out, "transport": "ipc"}
    return flockstep.run(job, strategy, partition=partition, **given).summary


def simulated(job: str, strategy: str, partition: str | None, out: Path, workers: int, steps: int = 6) -> Summary:
    given = {"workers": workers, "steps": steps, "evaluate_every": 2, "out": out}
    return flockstep.simulate(job, strategy, partition=partition, **given).summary


@pytest.mark.parametrize("partition", ["pipeline(2, 1f1b, 3)", pytest.param("tensor(2)", marks=FULL)])
def test_processes_that_read_other_samples_are_refused(tmp_path: Path, partition: str) -> None:
    """Otherwise the last stage would compare the outputs for some samples with the targets of others."""
    with pytest.raises(FlockstepError, match=r"the data has changed: inputs is .* in every process"):
        trained(shuffled_job.__file__, "all_reduce", partition, tmp_path / "run", 2)


def model(folder: Path) -> np.ndarray:
    return np.load(folder / "result.npy")


def losses(folder: Path) -> dict[tuple[int, int], float | None]:
    return {(e.rank, e.step): e.loss for e in RunFolder(folder).read_events() if isinstance(e, StepEvent)}


def evaluations(folder: Path) -> list[tuple[float, float, float]]:
    found = [e for e in RunFolder(folder).read_events() if isinstance(e, EvaluationEvent)]
    return [(e.step, e.loss, e.metric) for e in sorted(found, key=lambda e: e.step)]


@pytest.mark.parametrize(
    ("strategy", "partition", "replicas"),
    [
        ("ps(bsp, shards=2)", "pipeline(2, 1f1b, 3)", 2),
        pytest.param("all_reduce", "pipeline(2, 1f1b, 3)", 2, marks=FULL),
        pytest.param("local_sgd(period=2)", "pipeline(2, zb_h1, 5)", 2, marks=FULL),
        pytest.param("all_reduce", "pipeline(2, interleaved(2), 4)", 2, marks=FULL),
        pytest.param("local_sgd", "pipeline(4, gpipe, 4)", 1, marks=FULL),
        pytest.param("all_reduce", "pipeline(4, 1f1b, 6)", 1, marks=FULL),
    ],
)
def test_real_processes_train_a_split_model(tmp_path: Path, strategy: str, partition: str, replicas: int) -> None:
    parts = int(partition[len("pipeline(")])
    real = trained(CHAIN, strategy, partition, tmp_path / "real", replicas * parts)
    virtual = simulated(CHAIN, strategy, partition, tmp_path / "virtual", replicas * parts)
    simulated(CHAIN, strategy, None, tmp_path / "whole", replicas)
    assert real.hashes == virtual.hashes, "every worker and server ends with the same bits"
    assert model(tmp_path / "real").tobytes() == model(tmp_path / "virtual").tobytes()
    if "interleaved" not in partition:  # which lists the parameters in another order
        np.testing.assert_allclose(model(tmp_path / "real"), model(tmp_path / "whole"), rtol=0, atol=1e-13)
    assert losses(tmp_path / "real") == losses(tmp_path / "virtual")
    assert evaluations(tmp_path / "real") == evaluations(tmp_path / "virtual")
    assert len(evaluations(tmp_path / "real")) == 4
    assert (real.completeness, real.replicas_agree, real.workers) == (virtual.completeness, True, replicas * parts)
    assert [one.sent_bytes for one in real.per_worker] == [one.sent_bytes for one in virtual.per_worker]


@FULL
def test_asynchronous_stages_and_running_statistics(tmp_path: Path) -> None:
    """Negative control of the equality with the unsplit model: PipeDream's delayed gradients.

    On the way, virtual time evaluates with running statistics of a later moment in the stages that are ahead.
    """
    real = trained(NORMS, "local_sgd(period=3)", "pipeline(2, pipedream, 1)", tmp_path / "real", 4)
    virtual = simulated(NORMS, "local_sgd(period=3)", "pipeline(2, pipedream, 1)", tmp_path / "virtual", 4)
    simulated(NORMS, "local_sgd(period=3)", None, tmp_path / "whole", 2)
    assert real.hashes == virtual.hashes
    assert evaluations(tmp_path / "real")[-1] == evaluations(tmp_path / "virtual")[-1]
    assert np.abs(model(tmp_path / "real") - model(tmp_path / "whole")).max() > 1e-3


NEEDS_VALUES = """
import sys
sys.path.insert(0, {tests!r})
import torch
from torch import nn
from support.split_jobs import chain, job_of

class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(6, 6, dtype=torch.float64)
        self.scale = self.weight.mean().item()

    def forward(self, x):
        return self.scale * super().forward(x)

def model():
    torch.manual_seed(1)
    return nn.Sequential(Scaled(), *chain())

def job():
    return job_of(model)
"""


@FULL
def test_a_model_that_needs_values_to_be_built_is_built_by_every_process(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(NEEDS_VALUES.format(tests=str(Path(__file__).parents[1])))
    real = trained(str(tmp_path / "job.py"), "all_reduce", "pipeline(2, 1f1b, 3)", tmp_path / "real", 2)
    virtual = simulated(str(tmp_path / "job.py"), "all_reduce", "pipeline(2, 1f1b, 3)", tmp_path / "virtual", 2)
    assert real.hashes == virtual.hashes
    assert real.notes[0].startswith("every process built the whole model before it kept its part, because the parts")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers": 3}, "must be a multiple of 2 for pipeline"),
        (
            {"batch": 3, "partition": "pipeline(2, 1f1b, 4)"},
            "microbatches must be at most the 3 samples of a batch, got 4; use a larger batch or fewer micro-batches",
        ),
        (
            {"checkpoint_every": 2, "partition": "pipeline(2, pipedream)"},
            "in which no micro-batch is in flight at the end of a step, got checkpoint_every=2 .* such as 1f1b",
        ),
        ({"min_workers": 2}, "workers cannot leave a run of a split model on real processes yet, got min_workers=2"),
        ({"max_workers": 8}, "workers cannot join a run of a split model on real processes yet, got max_workers=8"),
        ({"faults": ("flips_sign(1)",)}, r"faults cannot be injected into .* got flips_sign\(1\)"),
        ({"max_gradient_norm": 1.0}, "max_gradient_norm need whole gradients"),
        ({"strategy": "codistillation"}, "whose workers compute only the gradient of their next batch, got codist"),
        (
            {"job": "charlm", "partition": "pipeline(2, ddg)"},
            "at most 1 chunks, .* because embedding and embedding#2 share weights",
        ),
    ],
)
def test_what_is_refused_before_anything_starts(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    facts: dict[str, Any] = {
        "job": CHAIN,
        "strategy": "all_reduce",
        "workers": 4,
        "steps": 2,
        "partition": "pipeline(2)",
    } | given
    with pytest.raises(FlockstepError, match=message):
        flockstep.run(facts.pop("job"), facts.pop("strategy"), out=tmp_path / "run", **facts)
    assert not (tmp_path / "run").exists()
