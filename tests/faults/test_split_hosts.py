"""SIGTERM ends a run of a split model on two hosts with a checkpoint, from which the run goes on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flockstep
from flockstep.records.folder import RunFolder
from support.hosts import PORT, Ended, Host, network, require, require_idle
from support.jobs import go_on
from support.processes import PATIENCE, content, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs network namespaces")
STEPS = 24
JOB = """
import dataclasses, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from support.split_jobs import job as plain

GO = Path(__file__).with_name("go")

def job():
    one = plain()

    def paced(outputs, targets):
        if not GO.exists():
            time.sleep(0.05)
        return one.loss(outputs, targets)

    return dataclasses.replace(one, loss=paced)
"""


@pytest.fixture
def two() -> Iterator[list[Host]]:
    with network(2) as hosts:
        yield hosts


@pytest.mark.full
@pytest.mark.parametrize("whom", [0, 1])
def test_sigterm_on_a_host_ends_a_split_run_with_a_checkpoint(two: list[Host], tmp_path: Path, whom: int) -> None:
    """Each replica has a stage on each host."""
    (tmp_path / "job.py").write_text(JOB.format(tests=str(Path(__file__).parents[1])))
    file, strategy, partition = str(tmp_path / "job.py"), "local_sgd(3)", "pipeline(4, 1f1b, 4)"
    words = ["train", file, "-s", strategy, "--partition", partition, "-n", "4", "--steps", str(STEPS)]
    where = ["--nodes", "2", "--coordinator", f"{two[0].address}:{PORT}"]
    other = two[1].start(*words, *where, "--node-rank", "1")
    first = two[0].start(*words, *where, "--node-rank", "0", "--out", tmp_path / "run")
    events = tmp_path / "run" / "events" / "worker-0.jsonl"
    wait_until(lambda: content(events).count(b'"step"') >= 2 or first.poll() is not None, PATIENCE, "two steps")
    assert first.poll() is None, Ended.of(first)
    (first, other)[whom].send_signal(signal.SIGTERM)
    ended = [Ended.of(first), Ended.of(other)]
    assert all(one.code for one in ended)
    assert "continues from step" in ended[0].err, ended
    require_idle(two)
    go_on(tmp_path)
    other = two[1].start(*words, *where, "--node-rank", "1")
    first = two[0].start("resume", tmp_path / "run", *where, "--node-rank", "0")
    again = [Ended.of(first), Ended.of(other)]
    require(again, 0, 0)
    given = {"partition": partition, "workers": 4, "steps": STEPS}
    virtual = flockstep.simulate(file, strategy, out=tmp_path / "virtual", **given).summary
    real = RunFolder(tmp_path / "run").read_summary()
    assert real.notes[0].startswith("resumed from step ")
    assert real.hashes == virtual.hashes
