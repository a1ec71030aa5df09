"""Sealed jobs on real processes, in a folder with nothing of the sender: equal to the jobs themselves."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import flockstep
import support.compiler  # noqa: F401
from flockstep.experiments.single import RunResult
from support.matrix import few
from support.processes import RealRun
from support.sealed_data import write_data, write_job
from support.sealed_jobs import JOBS
from support.sealed_runs import TESTS, command, evaluations, trained

REPEATS = ("all_reduce", "local_sgd(period=4)")
"""Strategies whose runs on real processes have the same bits every time."""
STRATEGIES = (*REPEATS, "ps(ssp(3))", "gossip")
STEPS = ["-n", "2", "--steps", "12", "--transport", "ipc"]


@pytest.mark.parametrize(
    ("name", "strategy"),
    few([(name, strategy) for name in JOBS for strategy in STRATEGIES], ("gpt", "gossip"), ("normed", "ps(ssp(3))")),
)
def test_a_simulation_of_a_sealed_job_has_the_bits_of_the_job(name: str, strategy: str, tmp_path: Path) -> None:
    file = flockstep.seal(JOBS[name](), out=tmp_path / "model.sealed", rename=True)
    data = str(write_data(tmp_path / "data", JOBS[name]().data()))
    options = [
        "-s",
        strategy,
        "-n",
        "3",
        "--steps",
        "9",
    ]  # in two processes: torch chooses kernels by its first warning
    ours = trained(tmp_path, "ours", "simulate", str(write_job(tmp_path, name)), *options, path=TESTS)
    theirs = trained(tmp_path, "theirs", "simulate", str(file), "--data", data, "--trust", "anyone", *options)
    assert ours.parameters()[0].tobytes() == theirs.parameters()[0].tobytes()
    assert evaluations(ours) == evaluations(theirs)


@pytest.mark.parametrize(
    ("name", "strategy"),
    few(
        [(name, strategy) for name in JOBS for strategy in STRATEGIES],
        ("normed", "all_reduce"),
        ("gpt", "ps(ssp(3))"),
        ("cnn", "gossip"),
        ("lstm", "local_sgd(period=4)"),
    ),
)
def test_a_customer_trains_what_the_sender_would(name: str, strategy: str, tmp_path: Path) -> None:
    sender, customer = tmp_path / "sender", tmp_path / "customer"
    sender.mkdir()
    customer.mkdir()
    job = JOBS[name]()
    flockstep.seal(job, out=customer / "model.sealed", rename=True)
    write_data(customer / "data", job.data())
    given = ["model.sealed", "--data", "data", "--trust", "anyone"]
    theirs = trained(customer, "run", "train", *given, "-s", strategy, *STEPS)
    if strategy not in REPEATS:
        assert theirs.summary.status == "finished"
        return
    ours = trained(sender, "run", "train", str(write_job(sender, name)), "-s", strategy, *STEPS, path=TESTS)
    assert bool(ours.buffers()) == (name == "normed")
    kept = [sorted(value.tobytes() for value in run.buffers().values()) for run in (ours, theirs)]
    assert kept[0] == kept[1]
    assert ours.parameters()[0].tobytes() == theirs.parameters()[0].tobytes()
    assert evaluations(ours) == evaluations(theirs)


def test_a_run_of_a_sealed_job_is_resumed_with_its_bits_and_other_commands_take_it(tmp_path: Path) -> None:
    job = JOBS["cnn"]()
    file, data = flockstep.seal(job, out=tmp_path / "model.sealed"), write_data(tmp_path / "data", job.data())
    given = [str(file), "--data", str(data), "--trust", "anyone", "-n", "2"]
    words = ["train", *given, "-s", "all_reduce", "--steps", "900", "--import", f"{TESTS}/support/compiler.py"]
    run = RealRun(words, tmp_path / "run", torch=True)
    run.wait_for_work()
    run.fault(signal.SIGTERM, "main")
    assert run.end().code == 130
    assert RealRun(["resume"], tmp_path / "run", torch=True).end().code == 0
    whole = trained(tmp_path, "whole", *words, "--transport", "ipc")
    assert whole.parameters()[0].tobytes() == RunResult.read(tmp_path / "run").parameters()[0].tobytes()
    done = command(tmp_path, "compare", *given, "-s", "all_reduce", "-s", "gossip", "--steps", "4", "--simulate")
    assert "gossip" in done.stdout, done.stderr
    done = command(tmp_path, "plan", *given, "--budget", "0")
    assert done.returncode == 0, done.stderr
