"""A run of a split model that is killed and resumed ends as the run that was not killed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import flockstep
from flockstep.errors import ConfigurationError
from flockstep.launchers.train import resume
from flockstep.records.events import EvaluationEvent, StepEvent
from flockstep.records.folder import RunFolder
from flockstep_lab.chaos.base import Failpoint
from flockstep_lab.chaos.failpoint import signalled, write_failpoint
from support.matrix import few
from support.processes import RealRun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes by their names in /proc")
STEPS = 36
FILE = """
import sys
sys.path.insert(0, {tests!r})
from support.{name} import job
"""


QSGD = "pipeline(2, 1f1b, 3, codec=qsgd(8))"


@pytest.mark.parametrize(
    ("job", "strategy", "partition", "workers", "who", "point", "number"),
    few(
        [
            ("split_job", "ps(bsp)", QSGD, 2, "launcher", "manifest.renamed", 2),
            ("split_job", "ps(bsp)", QSGD, 4, "launcher", "manifest.renamed", 2),
            ("split_jobs", "local_sgd(3)", "pipeline(2, zb_h1, 4)", 4, "worker-2", "shard.written", 2),
            ("joint_job", "local_sgd(3)", "sharded(2)", 4, "worker-2", "gradient.computed", 33),
            ("joint_job", "all_reduce", "sharded(4)", 4, "worker-1", "shard.written", 2),
            ("joint_norms", "ps(bsp)", "tensor(2)", 4, "launcher", "manifest.renamed", 2),
            ("split_jobs", "all_reduce", "pipeline(4, gpipe, 4)", 4, "worker-3", "gradient.computed", 33),
            ("grid_jobs", "local_sgd(3)", "grid(2, 1)", 4, "worker-3", "gradient.computed", 33),
        ],
        ("split_job", "ps(bsp)", QSGD, 2, "launcher", "manifest.renamed", 2),
        ("joint_norms", "ps(bsp)", "tensor(2)", 4, "launcher", "manifest.renamed", 2),
    ),
)
def test_a_killed_split_run_goes_on_with_its_bits(
    tmp_path: Path, job: str, strategy: str, partition: str, workers: int, who: str, point: str, number: int
) -> None:
    """Momentum, running statistics and the random numbers of a codec are part of the state."""
    (tmp_path / "job.py").write_text(FILE.format(tests=str(Path(__file__).parents[1]), name=job))
    file = str(tmp_path / "job.py")
    kill = write_failpoint(tmp_path, Failpoint(who, point, number))
    words = ["train", file, "-s", strategy, "--partition", partition, "-n", str(workers), "--steps", str(STEPS)]
    words += ["--evaluate-every", "10", "--checkpoint-every", "8", "--import", kill]
    assert RealRun(words, tmp_path / "run", torch=True).end().code != 0
    assert signalled(tmp_path) is not None
    message = f"continues with as many workers as before, got {2 * workers} instead of {workers}; leave"
    with pytest.raises(ConfigurationError, match=message):
        resume(tmp_path / "run", workers=2 * workers)
    again = RealRun(["resume"], tmp_path / "run", torch=True).end()
    assert again.code == 0, again.err
    assert again.summary is not None
    assert again.summary["notes"][0].startswith("resumed from step ")
    # PyTorch adds in another order than virtual time
    uninterrupted = flockstep.run if job.startswith("joint") else flockstep.simulate
    given = {"partition": partition, "workers": workers, "steps": STEPS, "evaluate_every": 10}
    known = uninterrupted(file, strategy, out=tmp_path / "whole", **given).summary
    ours, whole = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "whole")
    assert again.summary["hashes"] == {str(node): one for node, one in known.hashes.items()}
    for rank in range(workers):
        found, expected = (
            [(e.step, e.loss) for e in one.read_events() if isinstance(e, StepEvent) and e.rank == rank]
            for one in (ours, whole)
        )
        assert found == expected, "every step is in the record once"
    found, expected = ([e.step for e in one.read_events() if isinstance(e, EvaluationEvent)] for one in (ours, whole))
    assert found == expected
