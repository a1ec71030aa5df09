"""Workers join a run that is going on, by `flockstep join`."""

from __future__ import annotations

import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flockstep.cli.app import run as run_command
from flockstep.errors import ConfigurationError
from flockstep.launchers.join_requests import ask
from flockstep.records import checkpoints as disk
from flockstep.records.config import RunConfig
from flockstep.records.events import StepEvent
from flockstep.records.folder import RunFolder
from flockstep.strategies.base import Strategy
from support.jobs import go_on, paced, paced_train
from support.matrix import few
from support.processes import PATIENCE, RealRun, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes by their names in /proc")

STEPS = 120


def begin(folder: Path, strategy: str, *more: str) -> RealRun:
    words = paced_train(folder, strategy, 2, STEPS, slow_after=40)
    return RealRun([*words, "--max-workers", "4", *more], folder / "run")


def join(folder: Path, workers: int = 1) -> int:
    return run_command(["join", str(folder / "run"), "-n", str(workers)])


def result_of(record: RunFolder) -> bytes:
    return record.read_result()[0].tobytes()


@pytest.mark.parametrize(
    ("strategy", "workers"),
    few(
        [
            ("all_reduce", 1),
            ("ps(bsp)", 2),
            ("asgd", 1),
            ("easgd(4)", 1),
            ("gossip(0.5)", 1),
            ("adpsgd", 2),
            ("dpsgd", 1),
            ("local_sgd(8, outer_optimizer=nesterov)", 1),
        ],
        ("gossip(0.5)", 1),
    ),
)
def test_workers_join_while_the_others_stay_in_their_processes(
    strategy: str, workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin(tmp_path, strategy)
    run.wait_for_work(25)
    before = run.working()
    assert join(tmp_path, workers) == 0
    assert f"the run continues with {2 + workers} workers from step " in capsys.readouterr().out
    now = run.working()
    assert {name: now[name] for name in ("worker-0", "worker-1")} == {
        name: before[name] for name in ("worker-0", "worker-1")
    }
    assert {f"worker-{rank}" for rank in range(2 + workers)} <= set(now)
    go_on(tmp_path)
    ended = run.end()
    assert ended.code == 0, ended.err
    record = RunFolder(tmp_path / "run")
    summary, config = record.read_summary(), record.read_config()
    total = 2 + workers
    assert (summary.status, config.workers, config.steps) == ("finished", total, -(-2 * STEPS // total))
    goes_on = "with the step in hand" if Strategy.parse(strategy).repeats else "from step"
    assert summary.notes[0].startswith(f"{workers} worker{'s' * (workers > 1)} joined; the run continued {goes_on}")
    assert summary.notes[0].endswith(("; 0 recorded steps were repeated", "with the step in hand"))
    made = [event for event in record.read_events() if isinstance(event, StepEvent)]
    assert {event.rank for event in made} == set(range(total))
    if Strategy.parse(config.strategy).traits.fixed_steps:
        assert [event.step for event in made if event.rank == total - 1][-1] == config.steps
    assert not (tmp_path / "run" / "joining").exists()


@pytest.mark.parametrize("strategy", few(["all_reduce", "ps(bsp)"], "ps(bsp)"))
def test_a_run_that_a_worker_joins_ends_with_the_bits_of_one_that_was_stopped_and_resumed(
    strategy: str, tmp_path: Path
) -> None:
    run = begin(tmp_path, strategy, "--keep", "1000")
    run.wait_for_work(25)
    assert join(tmp_path) == 0
    go_on(tmp_path)
    ended = run.end()
    assert ended.code == 0, ended.err
    record = RunFolder(tmp_path / "run")
    joined = result_of(record)
    of_two = [folder for folder in disk.folders(record.path) if disk.read_manifest(folder).workers == 2]
    for folder in disk.folders(record.path):
        if folder not in of_two:
            disk.remove(folder)
    config = disk.kept_config(record.path, disk.read_manifest(of_two[-1]).config)
    assert config is not None
    record.write_config(RunConfig.from_toml(config, "the configuration of two workers"))
    record.summary_file.unlink()
    record.result_file.unlink()
    ended = RealRun(["resume", "-n", "3"], record.path).end()
    assert ended.code == 0, ended.err
    assert result_of(record) == joined


@pytest.mark.full
def test_a_worker_leaves_and_another_takes_its_place(tmp_path: Path) -> None:
    run = begin(tmp_path, "ps(bsp)", "--min-workers", "1", "--checkpoint-every", "1000")
    run.wait_for_work(25)
    run.fault(signal.SIGTERM, "worker-0")
    record = RunFolder(tmp_path / "run")
    wait_until(lambda: record.read_config().workers == 1, PATIENCE, "the run goes on with one worker")
    assert join(tmp_path, 2) == 0
    go_on(tmp_path)
    ended = run.end()
    assert ended.code == 0, ended.err
    assert (record.read_config().workers, record.read_config().steps) == (3, 2 * STEPS // 3)


DIES = """
import os
from pathlib import Path
from flockstep.runtime.member import Member

begin = Member.begin

def die(member):
    if member.node_spec.address == 2 and Path({file!r}).exists():
        os.unlink({file!r})
        os._exit(9)
    begin(member)

Member.begin = die
"""


@pytest.mark.full
@pytest.mark.parametrize("more", [(), ("--min-workers", "1", "--checkpoint-every", "1000")])
def test_a_worker_that_dies_while_the_workers_change_is_left_out(more: tuple[str, ...], tmp_path: Path) -> None:
    """A worker that joins never ends the run, also without `--min-workers`."""
    (tmp_path / "dies.py").write_text(DIES.format(file=str(tmp_path / "die")))
    run = begin(tmp_path, "asgd", *more, "--import", str(tmp_path / "dies.py"))
    run.wait_for_work(25)
    (tmp_path / "die").touch()
    assert join(tmp_path) == 0
    assert not (tmp_path / "die").exists()
    go_on(tmp_path)
    ended = run.end()
    assert ended.code == 0, ended.err
    record = RunFolder(tmp_path / "run")
    assert record.read_config().workers == 2
    assert any("exited with code 9" in note for note in record.read_summary().notes)


FAILS = """
import multiprocessing

paced_job = job

def job():
    if multiprocessing.current_process().name == "flockstep-node" and GO.with_name("fail").exists():
        GO.with_name("held").touch()
        while GO.with_name("hold").exists():
            time.sleep(0.01)
        raise ValueError("no data here")
    return paced_job()
"""


def test_a_worker_that_cannot_build_the_job_does_not_join_and_nobody_stops_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Path(paced(tmp_path, slow_after=40))
    job.write_text(job.read_text() + FAILS)
    words = ["train", str(job), "-s", "gossip(0.5)", "-n", "2", "--steps", str(STEPS), "--max-workers", "4"]
    run = RealRun(words, tmp_path / "run")
    run.wait_for_work(5)
    wait_until(run.evaluating, PATIENCE, "the process that evaluates has built the job")
    for name in ("fail", "hold"):
        (tmp_path / name).touch()
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(ask, RunFolder(tmp_path / "run"), 2)
        wait_until((tmp_path / "held").exists, PATIENCE, "a new worker builds the job")
        before = run.steps(0)
        wait_until(lambda: run.steps(0) > before + 2, PATIENCE, "the others train meanwhile")
        (tmp_path / "hold").unlink()
        with pytest.raises(
            ConfigurationError, match=r"no worker can join now: .* job\(\) raised ValueError: no data here"
        ):
            answer.result(PATIENCE)
    job.write_text(job.read_text() + "\n")
    assert join(tmp_path) == 2
    assert f"{job} has changed since the run began" in capsys.readouterr().err
    assert run.going()
    assert not (tmp_path / "run" / "checkpoints").exists(), "no node was stopped"
    assert len(run.working()) == 2
    go_on(tmp_path)
    ended = run.end()
    assert ended.code == 0, ended.err


def test_workers_that_cannot_join_are_refused_and_the_run_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin(tmp_path, "adpsgd")
    run.wait_for_work(5)
    assert join(tmp_path, 3) == 2
    assert "the number of workers must be <= --max-workers 4, got 5; let fewer workers join" in capsys.readouterr().err
    assert join(tmp_path) == 2
    assert "adpsgd on ring needs a bipartite graph" in capsys.readouterr().err
    go_on(tmp_path)
    ended = run.end()
    assert ended.code == 0, ended.err
    assert RunFolder(tmp_path / "run").read_config().workers == 2
    assert join(tmp_path) == 2
    assert "no process trains in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["-s", "all_reduce", "--max-workers", "1"],
            "max_workers must be >= 2, the number of workers, got 1; raise it",
        ),
        (
            ["-s", "ensemble", "--max-workers", "4"],
            "no rule determines the model of a new worker; leave out --min-workers and",
        ),
        (["-s", "hogwild", "--max-workers", "4"], "has no checkpoints"),
    ],
)
def test_bad_options_are_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["train", "softmax", "-n", "2", *words, "--out", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_without_max_workers_takes_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "softmax", "-s", "all_reduce", "-n", "1", "--steps", "2", "--out", str(tmp_path / "run")]
    assert run_command(words) == 0
    assert join(tmp_path) == 2
    assert "workers can join only a run with --max-workers" in capsys.readouterr().err
