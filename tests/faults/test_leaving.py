"""Workers leave a run, or are killed, and the others go on in their processes."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from flockstep.cli.app import run as run_command
from flockstep.records import checkpoints as disk
from flockstep.records.config import RunConfig
from flockstep.records.events import StepEvent
from flockstep.records.folder import RunFolder
from flockstep.strategies.base import Strategy
from support.jobs import go_on, paced_train
from support.matrix import few
from support.processes import PATIENCE, RealRun, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes by their names in /proc")

STEPS = 120


def begin(folder: Path, strategy: str, least: int = 1, *more: str) -> RealRun:
    words = paced_train(folder, strategy, 3, STEPS)
    return RealRun([*words, "--checkpoint-every", "10", "--min-workers", str(least), *more], folder / "run")


def workers_of(run: RealRun) -> int:
    return RunFolder(run.record).read_config().workers


@pytest.mark.parametrize(
    ("strategy", "sign"),
    few(
        [
            ("all_reduce", signal.SIGTERM),
            ("all_reduce", signal.SIGKILL),
            ("ps(bsp)", signal.SIGTERM),
            ("ps(bsp)", signal.SIGKILL),
            ("ps(bsp, replicas=1)", signal.SIGTERM),
            ("asgd", signal.SIGTERM),
            ("local_sgd(8, outer_optimizer=nesterov)", signal.SIGKILL),
            ("gossip(0.5)", signal.SIGTERM),
            ("dpsgd", signal.SIGTERM),
            ("streaming_diloco(period=8, overlap=4)", signal.SIGTERM),
            ("easgd(4)", signal.SIGTERM),
        ],
        ("all_reduce", signal.SIGKILL),
        ("asgd", signal.SIGTERM),
    ),
)
def test_the_others_go_on_in_their_processes(strategy: str, sign: signal.Signals, tmp_path: Path) -> None:
    run = begin(tmp_path, strategy)
    run.wait_for_work(25)
    before = run.working()
    run.fault(sign, "worker-1")
    wait_until(lambda: workers_of(run) == 2, PATIENCE, "the run goes on with two workers")
    wait_until(
        lambda: set(run.working()) >= {"worker-0", "worker-1"} and before["worker-1"] not in run.working().values(),
        PATIENCE,
        "who left is gone",
    )
    now = run.working()
    assert {now["worker-0"], now["worker-1"]} == {before["worker-0"], before["worker-2"]}, "no process was started"
    go_on(tmp_path)
    ended = run.end()
    assert ended.code == 0, ended.err
    record = RunFolder(tmp_path / "run")
    summary, config = record.read_summary(), record.read_config()
    assert (summary.status, config.workers, config.steps) == ("finished", 2, 3 * STEPS // 2)
    how = "worker 1 left after SIGTERM" if sign == signal.SIGTERM else "worker 1 was killed by SIGKILL"
    assert summary.notes[0].startswith(how)
    if Strategy.parse(strategy).repeats:
        assert summary.notes[0].endswith("; the other workers continued with the step in hand")
    else:
        repeated = int(summary.notes[0].split("; ")[-1].split()[0])
        assert repeated == 0 or sign == signal.SIGKILL
    made = [event for event in record.read_events() if isinstance(event, StepEvent) and event.rank == 0]
    assert made[-1].step == config.steps


def test_too_few_workers_end_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    run = begin(tmp_path, "all_reduce", least=3)
    run.wait_for_work(25)
    run.fault(signal.SIGTERM, "worker-2")
    ended = run.end()
    assert ended.code == 130
    said = (
        "worker 2 left after SIGTERM, and the 2 remaining workers are fewer than --min-workers 3; everything computed"
    )
    assert said in ended.err
    assert "continues from step" in ended.err


@pytest.mark.parametrize(
    ("strategy", "sign"),
    few(
        [
            ("dpsgd", signal.SIGTERM),
            ("ps(bsp)", signal.SIGKILL),
            ("streaming_diloco(period=8, overlap=4)", signal.SIGTERM),
        ],
        ("dpsgd", signal.SIGTERM),
    ),
)
def test_a_run_that_a_worker_leaves_ends_with_the_bits_of_one_that_was_stopped_and_resumed(
    strategy: str, sign: signal.Signals, tmp_path: Path
) -> None:
    run = begin(tmp_path, strategy, 1, "--keep", "1000")
    run.wait_for_work(25)
    run.fault(sign, "worker-2")  # the worker that `resume -n 2` leaves out
    wait_until(lambda: workers_of(run) == 2, PATIENCE, "the run goes on with two workers")
    go_on(tmp_path)
    ended = run.end()
    assert ended.code == 0, ended.err
    record = RunFolder(tmp_path / "run")
    left = record.read_result()[0]
    of_three = [folder for folder in disk.folders(record.path) if disk.read_manifest(folder).workers == 3]
    for folder in disk.folders(record.path):
        if folder not in of_three:
            disk.remove(folder)
    record.summary_file.unlink()
    config = disk.kept_config(record.path, disk.read_manifest(of_three[-1]).config)
    record.write_config(RunConfig.from_toml(config, "the configuration of three workers"))
    ended = RealRun(["resume", "-n", "2"], record.path).end()
    assert ended.code == 0, ended.err
    again = record.read_result()[0]
    assert again.tobytes() == left.tobytes()


@pytest.mark.full
def test_a_signal_to_all_processes_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    run = begin(tmp_path, "all_reduce")
    run.wait_for_work(25)
    for name in ("main", "worker-0", "worker-1", "worker-2"):
        run.fault(signal.SIGTERM, name)
    ended = run.end()
    assert ended.code == 130
    assert "stopped by SIGTERM; everything computed so far is in the record; flockstep resume" in ended.err


@pytest.mark.full
def test_workers_leave_one_after_another(tmp_path: Path) -> None:
    run = begin(tmp_path, "ps(bsp)")
    run.wait_for_work(25)
    for count in (2, 1):
        first = run.working()["worker-0"]
        os.kill(first, signal.SIGTERM)
        wait_until(lambda count=count: workers_of(run) == count, PATIENCE, "a worker leaves")
        wait_until(
            lambda first=first: run.working().get("worker-0", first) != first, PATIENCE, "ranks are counted anew"
        )
    go_on(tmp_path)
    ended = run.end()
    assert ended.code == 0, ended.err
    record = RunFolder(tmp_path / "run")
    assert (record.read_config().workers, record.read_config().steps) == (1, 3 * STEPS)
    assert sum(note.startswith("worker 0 left after SIGTERM") for note in record.read_summary().notes) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-s", "dpsgd"], "min_workers needs checkpoints, from which the run continues when a worker is lost"),
        (
            ["-s", "ensemble", "--checkpoint-every", "9"],
            "no rule determines the model of a new worker; leave out --min-workers and --max-workers",
        ),
        (["-s", "hogwild", "--checkpoint-every", "9"], "has no checkpoints"),
        (["-s", "all_reduce", "--checkpoint-every", "9", "--min-workers", "3"], "min_workers must be <= 2, the number"),
    ],
)
def test_bad_options_are_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*words, *([] if "--min-workers" in words else ["--min-workers", "1"])]
    assert run_command(["train", "softmax", "-n", "2", *given, "--out", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_a_fault_of_gradients_stays_with_its_worker(tmp_path: Path) -> None:
    """Worker 2 becomes worker 1, and its gradients are enlarged as before."""
    run = begin(tmp_path, "all_reduce", 1, "--fault", "enlarges(2, 1.5)", "--fault", "little_is_enough(0)")
    run.wait_for_work(25)
    run.fault(signal.SIGTERM, "worker-0")
    wait_until(lambda: workers_of(run) == 2, PATIENCE, "the run goes on with two workers")
    go_on(tmp_path)
    ended = run.end()
    assert ended.code == 0, ended.err
    assert RunFolder(tmp_path / "run").read_config().faults == ("enlarges(worker=1, factor=1.5)",)
