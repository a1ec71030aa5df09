"""Peak memory of the processes of a run, in multiples of the model."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import SOURCE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

FILE = Path(__file__).parents[2] / "benchmarks" / "memory.py"
PARAMETERS = 20e6


@pytest.mark.full
@pytest.mark.timeout(600)  # two runs with torch in every process
def test_no_process_holds_more_than_a_few_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """By how much each grows from a model of 20 MB to one of 80: what is imported drops out.

    Four models are the aim for a worker; it takes 3.6 to 4.4 of them, depending on how far apart workers are.
    """
    spec = importlib.util.spec_from_file_location("benchmark_memory", FILE)
    assert spec is not None
    assert spec.loader is not None
    memory = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, memory)  # its dataclass looks itself up
    spec.loader.exec_module(memory)
    found = {one.process: one.models for one in memory.measure(PARAMETERS)}
    assert {"supervisor", "worker-0", "worker-1"} <= set(found)
    workers = [found["worker-0"], found["worker-1"]]
    assert all(2 < size <= 5 for size in workers), found  # more than parameters and momentum: they were seen at work
    assert 1 < found["supervisor"] <= 2, found  # one is made to check the job; of eight snapshots none is kept


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("dtype", "optimizer"), [("bfloat16", "adamw"), ("float32", "sgd")])
def test_a_worker_of_a_script_takes_little_more_memory_than_with_ddp(dtype: str, optimizer: str) -> None:
    """In bfloat16 both have a float32 master copy; DDP has buckets beside the gradients."""
    options = ["--models", "wide20m", "--processes", "2", "--ways", "ddp,flockstep", "--rounds", "1", "--batch", "4"]
    command = [sys.executable, str(FILE.with_name("step_time.py")), "--memory", "--json", *options]
    with_compiler = {**os.environ, "PYTHONPATH": str(SOURCE)}  # DDP asks the compiler of torch for its mode
    command += ["--dtype", dtype, "--optimizer", optimizer]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=with_compiler)
    (row,) = json.loads(done.stdout)
    assert 0.3 < row["ways"]["flockstep"]["of ddp"] < 1.2, row


@pytest.mark.full
def test_the_benchmark_of_steps_finishes_its_run() -> None:
    """Under `local_sgd` a script that does not is told that its models are not the result."""
    options = [
        "--models",
        "digits",
        "--processes",
        "2",
        "--ways",
        "flockstep",
        "--rounds",
        "1",
        "--strategy",
        "local_sgd",
    ]
    command = [sys.executable, str(FILE.with_name("step_time.py")), "--json", *options]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(SOURCE)}
    )
    assert json.loads(done.stdout)[0]["ways"]["flockstep"]["ms"] > 0
    assert "finish()" not in done.stderr
