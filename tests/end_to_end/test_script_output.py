"""What launched scripts print, and the threads they are given: as the user asked, and when it is printed."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flockstep.records.curves import curves
from flockstep.records.events import StepEvent
from flockstep.records.folder import RunFolder
from support.matrix import few
from support.processes import COMMAND, PATIENCE, RealRun, wait_until
from support.scripts import NUMPY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import flockstep

HERE, rank = Path(__file__).parent, flockstep.rank()
names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
(HERE / f"threads-{rank}").write_text(json.dumps([os.environ.get(name) for name in names]))
flockstep.join()
print("line", rank)
print("error", rank, file=sys.stderr)
while not (HERE / "go").exists():
    time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)


def launched(folder: Path, *options: str) -> RealRun:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return RealRun(["launch", "-n", "2", *options, str(script)], folder / "run")


CASES = [
    ((), ["line 0", "line 1"], ["error 0", "error 1"]),
    (("--prefix",), ["[rank 0] line 0", "[rank 1] line 1"], ["[rank 0] error 0", "[rank 1] error 1"]),
    (("--output", "rank0"), ["line 0"], ["error 0"]),
]


@pytest.mark.parametrize(("options", "out", "err"), few(CASES, CASES[1]))
def test_lines_come_while_the_script_runs(
    options: tuple[str, ...], out: list[str], err: list[str], tmp_path: Path
) -> None:
    run = launched(tmp_path, *options)
    wait_until(lambda: (run.scratch / "out").read_text().count("\n") == len(out), PATIENCE, "the lines are there")
    assert run.going()
    (tmp_path / "go").touch()
    ended = run.end()
    assert ended.code == 0
    assert sorted(ended.out.splitlines()) == out
    assert sorted(line for line in ended.err.splitlines() if "error" in line) == err


def test_each_rank_s_output_is_in_its_own_files_and_an_earlier_run_s_stays(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    said = tmp_path / "said"
    ended = launched(tmp_path, "--rank-output", str(said), "--output", "none").end()
    assert (ended.code, ended.out) == (0, "")
    assert "error" not in ended.err
    texts = {file.name: file.read_text() for file in said.iterdir()}
    lines = {f"rank-{rank}.out": f"line {rank}\n" for rank in range(2)}
    errors = {f"rank-{rank}.err": f"error {rank}\n" for rank in range(2)}
    assert texts == lines | errors
    again = launched(tmp_path, "--rank-output", str(said), "--overwrite", "--output", "rank0").end()
    assert (again.code, again.out) == (0, "line 0\n")
    assert {file.name: file.read_text() for file in said.iterdir()} == texts
    elsewhere = ("--out", str(tmp_path / "other"), "--rank-output", str(said))
    refused = launched(tmp_path, *elsewhere).end()
    assert refused.code == 2
    assert f"{said} holds the output of an earlier run, such as rank-0.err; choose another" in refused.err
    assert not (tmp_path / "other").exists()


def test_on_a_terminal_lines_stand_above_a_table_of_all_ranks(tmp_path: Path) -> None:
    """The table is drawn while the scripts run; every line is there once, whole."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [*COMMAND, "launch", "-n", "2", "--prefix", "--transport", "ipc", "--out", str(tmp_path / "run")]
    main, there = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    run = subprocess.Popen(
        [*command, str(script)], stdin=subprocess.DEVNULL, stdout=there, stderr=there, env=environment
    )
    os.close(there)
    seen = bytearray()
    reader = threading.Thread(target=read_all, args=(main, seen), daemon=True)
    reader.start()
    wait_until(lambda: all(word in seen for word in (b"running", b"worker 1", b"error 0", b"error 1")), PATIENCE, "all")
    (tmp_path / "go").touch()
    assert run.wait(PATIENCE) == 0
    reader.join(PATIENCE)
    os.close(main)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode()).replace("\r", "\n").splitlines()
    for line in ("[rank 0] line 0", "[rank 1] line 1", "[rank 0] error 0", "[rank 1] error 1"):
        assert shown.count(line) == 1, shown
    assert not any("loss" in line for line in shown)


def read_all(terminal: int, seen: bytearray) -> None:
    """Read what a terminal shows until its last process has ended."""
    with contextlib.suppress(OSError):
        while chunk := os.read(terminal, 1 << 16):
            seen += chunk


THREADING = [
    ({}, (), ["1", "1"]),
    ({"OMP_NUM_THREADS": "3"}, (), ["3", None]),
    ({"MKL_NUM_THREADS": "2"}, (), [None, "2"]),
    ({"OMP_NUM_THREADS": "3"}, ("--threads", "2"), ["2", "2"]),
]


@pytest.mark.parametrize(("given", "options", "threads"), few(THREADING, THREADING[1]))
def test_the_users_number_of_threads_is_kept(
    given: dict[str, str], options: tuple[str, ...], threads: list[str | None], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "go").touch()
    assert launched(tmp_path, *options).end().code == 0
    assert [json.loads((tmp_path / f"threads-{rank}").read_text()) for rank in range(2)] == [threads] * 2


LOSSES = """
import sys
import torch
import flockstep

torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=sys.argv[1])
for step in range(4):
    optimizer.zero_grad()
    loss = 0 * model(torch.ones(1, 2)).sum() + 10.0 * flockstep.rank() + step
    loss.backward()
    if step != 2:
        optimizer.record_loss(loss)
    optimizer.step()
optimizer.finish()
"""


@pytest.mark.parametrize(
    "strategy", few(["local_sgd(period=2)", "ps(consistency=asynchronous)", "bucketed"], "bucketed")
)
def test_the_losses_that_a_script_gives_are_in_its_record(strategy: str, tmp_path: Path) -> None:
    """A step without a loss has none, and not that of an earlier step."""
    script = tmp_path / "script.py"
    script.write_text(LOSSES)
    ended = RealRun(["launch", "-n", "2", str(script), strategy], tmp_path / "run", torch=True).end()
    assert ended.code == 0
    assert "Warning" not in ended.err
    steps = [event for event in RunFolder(tmp_path / "run").read_events() if isinstance(event, StepEvent)]
    found = {(event.rank, event.step): event.loss for event in steps}
    assert len(found) == 8
    first = min(step for _, step in found)
    for (rank, step), loss in found.items():
        assert loss == (None if step - first == 2 else 10.0 * rank + step - first)


METRICS = f"""{NUMPY}
start("local_sgd(period=2)")
for number in range(3):
    steps(2)
    optimizer.record_metric("accuracy", number / 10 + rank, True, 1 + 2 * rank)
    optimizer.record_metric("error", 1.0 - number / 10, False, None)
optimizer.finish()
optimizer.record_metric("accuracy", 0.9, True, 1)
"""


def test_the_metrics_of_a_script_are_in_its_record_also_that_of_its_result(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(METRICS)
    assert RealRun(["launch", "-n", "2", str(script)], tmp_path / "run").end().code == 0
    record = RunFolder(tmp_path / "run").read()
    found = {one.name: [(p.step, p.value) for p in one.points] for one in curves(record.config, record.events)}
    means = [(2, 0.75), (4, 0.85), (6, 0.95), (6, 0.9)]
    assert found == {
        "accuracy": [(n, pytest.approx(value)) for n, value in means],
        "error": [(2, 1.0), (4, 0.9), (6, 0.8)],
    }
    assert record.summary.metrics == {"accuracy": pytest.approx(0.9), "error": 0.8}


def test_who_joins_after_the_end_is_told_so(tmp_path: Path) -> None:
    body = """
import numpy as np
import flockstep
from flockstep.arrays.schema import Schema
from flockstep.runtime.loop import Loop
from flockstep.runtime.plan import LocalOptimizer
from flockstep.optimizers.sgd import SGD
from flockstep.strategies.base import Strategy

params = np.zeros(4, np.float32)
arguments = Schema.of({"w": (4,)}), Strategy.parse("all_reduce"), LocalOptimizer(SGD(lr=0.1), params), SGD(lr=0.1)
loop = Loop(params, np.zeros(4, np.float32), *arguments)
loop.finish()
flockstep.join()
"""
    script = tmp_path / "script.py"
    script.write_text(body)
    ended = RealRun(["launch", "-n", "2", str(script)], tmp_path / "run").end()
    assert ended.code == 1
    assert re.search(
        r"ConfigurationError: this process has left the run already; call flockstep\.join after .*finish\(\)", ended.err
    )
    assert "ZMQError" not in ended.err
