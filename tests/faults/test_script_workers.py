"""Workers join and leave the run of a script, which begins again from a checkpoint with the new number of workers."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flockstep.cli.app import run as run_command
from flockstep.records import checkpoints as disk
from flockstep.records.config import RunConfig
from flockstep.records.events import StepEvent
from flockstep.records.folder import RunFolder
from flockstep_lab.chaos.base import Failpoint
from flockstep_lab.chaos.failpoint import signalled, write_failpoint
from support.matrix import few
from support.processes import PATIENCE, RealRun, wait_until
from support.torch_scripts import end_scheduled_script, write_scheduled_script, write_script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes by their names in /proc")

EPOCHS = 12
ELASTIC = ("--keep", "1000", "--max-workers", "4")
ALIKE = ["all_reduce", "ps(bsp)", "all_reduce(codec=topk(0.3), feedback=residual)", "local_sgd(8)", "bucketed"]


def begin(folder: Path, strategy: str, *more: str) -> RealRun:
    words = ["launch", "-n", "2", *ELASTIC, *more, write_script(folder), strategy, str(EPOCHS)]
    run = RealRun(words, folder / "run", torch=True)
    run.wait_for_work(25)
    return run


def join(folder: Path, workers: int = 1) -> int:
    return run_command(["join", str(folder / "run"), "-n", str(workers)])


def end(folder: Path, run: RealRun) -> RunFolder:
    """Let the script go on to its end, and return the record."""
    (folder / "go").touch()
    ended = run.end()
    assert ended.code == 0, ended.err
    return RunFolder(folder / "run")


def outcome(folder: Path, workers: int) -> list[list[Any]]:
    return [torch.load(folder / f"end-{rank}") for rank in range(workers)]


def same(ours: list[Any], theirs: list[Any]) -> bool:
    return all(len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(ours, theirs, strict=True))


def stop_before_change(record: RunFolder, workers: int) -> None:
    """Leave the record as if the run had been stopped at its last checkpoint with so many workers."""
    before = [one for one in disk.folders(record.path) if disk.read_manifest(one).workers == workers]
    for one in disk.folders(record.path):
        if one not in before:
            disk.remove(one)
    config = disk.kept_config(record.path, disk.read_manifest(before[-1]).config)
    assert config is not None
    record.write_config(RunConfig.from_toml(config, "the configuration before the change"))
    record.summary_file.unlink()
    record.result_file.unlink()


def steps_of(record: RunFolder, rank: int) -> list[int]:
    return [one.step for one in record.read_events() if isinstance(one, StepEvent) and one.rank == rank]


@pytest.mark.parametrize("strategy", few(["ps(bsp)", "local_sgd(8)"], "ps(bsp)"))
def test_a_script_that_a_worker_joins_ends_with_the_bits_of_one_that_was_stopped_and_resumed(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin(tmp_path, strategy)
    assert join(tmp_path) == 0
    assert "the run continues with 3 workers from step " in capsys.readouterr().out
    record = end(tmp_path, run)
    summary, joined = record.read_summary(), outcome(tmp_path, 3)
    assert (summary.status, record.read_config().workers) == ("finished", 3)
    assert re.match("1 worker joined; the run continued from step [0-9]+, counted with 2 workers; ", summary.notes[0])
    assert any("3 workers continue the run of 2 workers, from step " in note for note in summary.notes)
    assert any(note.startswith("no worker trained for ") for note in summary.notes)
    assert steps_of(record, 2)[-1] == steps_of(record, 0)[-1]
    assert not (record.path / "joining").exists()
    stop_before_change(record, 2)
    ended = RealRun(["resume", "-n", "3"], record.path, torch=True).end()
    assert ended.code == 0, ended.err
    assert same(outcome(tmp_path, 3), joined)


@pytest.mark.parametrize("strategy", few(["ps(bsp)", "local_sgd(8)"], "ps(bsp)"))
def test_a_script_whose_worker_dies_ends_with_the_bits_of_one_that_was_stopped_and_resumed(
    strategy: str, tmp_path: Path
) -> None:
    run = begin(tmp_path, strategy, "--min-workers", "1", "--checkpoint-every", "20")
    run.fault(signal.SIGKILL, "worker-1")
    record = RunFolder(tmp_path / "run")
    wait_until(lambda: record.read_config().workers == 1, PATIENCE, "the run goes on with one worker")
    end(tmp_path, run)
    summary, alone = record.read_summary(), outcome(tmp_path, 1)
    assert summary.status == "finished"
    assert summary.notes[0].startswith("worker 1 was killed by SIGKILL")
    assert "; the other workers continued from step 2" in summary.notes[0]
    stop_before_change(record, 2)
    ended = RealRun(["resume", "-n", "1"], record.path, torch=True).end()
    assert ended.code == 0, ended.err
    assert same(outcome(tmp_path, 1), alone)


@pytest.mark.parametrize("strategy", few(["asgd", "gossip(0.5)", "easgd(4)", "ps(ssp(2), shards=2)"], "gossip(0.5)"))
def test_workers_join_a_script_with_an_asynchronous_strategy(strategy: str, tmp_path: Path) -> None:
    run = begin(tmp_path, strategy)
    assert join(tmp_path, 2) == 0
    record = end(tmp_path, run)
    assert (record.read_summary().status, record.read_config().workers) == ("finished", 4)
    assert all(steps_of(record, rank) for rank in range(4))


OTHERS = [
    "adpsgd",
    "broadcast",
    "decoupled_momentum",
    "downpour(overlap=False)",
    "dpsgd",
    "easgd_sync(period=4)",
    "majority_vote",
    "mpca",
    "overlap_local_sgd",
    "partial",
    "powersgd",
    "ps(bsp, shards=2, replicas=1)",
    "sgp(tau=2)",
    "slice_servers",
    "sparta",
    "streaming_diloco(period=8, fragments=2, overlap=1)",
    "tree_easgd",
    "tree_server",
    "two_way",
]


@pytest.mark.parametrize("strategy", few(OTHERS, "broadcast"))
def test_a_script_is_resumed_with_another_number_of_workers(strategy: str, tmp_path: Path) -> None:
    run = begin(tmp_path, strategy)
    run.fault(signal.SIGTERM, "main")
    assert run.end().code == 130
    steps = sum(disk.newest(tmp_path / "run").manifest.steps.values())
    (tmp_path / "go").touch()
    ended = RealRun(["resume", "-n", "4"], tmp_path / "run", torch=True).end()
    assert ended.code == 0, ended.err
    record = RunFolder(tmp_path / "run")
    assert (record.read_summary().status, record.read_config().workers) == ("finished", 4)
    assert [steps_of(record, rank)[0] for rank in (2, 3)] == [steps // 4 + 1] * 2


@pytest.mark.full
@pytest.mark.parametrize(("point", "number", "workers"), [("manifest.begun", 2, 2), ("manifest.renamed", 2, 3)])
def test_a_launcher_killed_while_a_worker_joins_goes_on_from_before_or_after(
    point: str, number: int, workers: int, tmp_path: Path
) -> None:
    """The first manifest of the change is that of the nodes that stopped, the second that of the new workers."""
    kill = write_failpoint(tmp_path, Failpoint("launcher", point, number))
    run = begin(tmp_path, "ps(bsp)", "--import", kill)
    assert join(tmp_path) != 0
    assert run.end().code != 0
    assert signalled(tmp_path) is not None
    (tmp_path / "go").touch()
    ended = RealRun(["resume"], tmp_path / "run", torch=True).end()
    assert ended.code == 0, ended.err
    record = RunFolder(tmp_path / "run")
    assert (record.read_summary().status, record.read_config().workers) == ("finished", workers)


@pytest.mark.full
def test_a_worker_that_dies_as_it_joins_is_left_out(tmp_path: Path) -> None:
    """Also without `--min-workers`."""
    script = Path(write_script(tmp_path))
    dies = "if rank == 2:\n    (HERE / 'died').touch()\n    import os; os._exit(9)\n\ndef samples("
    script.write_text(script.read_text().replace("def samples(", dies))
    run = RealRun(["launch", "-n", "2", *ELASTIC, str(script), "all_reduce", str(EPOCHS)], tmp_path / "run", torch=True)
    run.wait_for_work(5)
    assert join(tmp_path) == 0
    assert (tmp_path / "died").exists()
    record = end(tmp_path, run)
    assert (record.read_summary().status, record.read_config().workers) == ("finished", 2)
    assert any("worker 2 exited with code 9" in note for note in record.read_summary().notes)


def test_a_worker_joins_only_where_another_has_died(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a loop around `flockstep join` does; the worker that is alone meanwhile deals its data all the same."""
    run = begin(tmp_path, "all_reduce", "--min-workers", "1", "--max-workers", "2", "--checkpoint-every", "20")
    assert join(tmp_path) == 2
    assert "the number of workers must be <= --max-workers 2, got 3" in capsys.readouterr().err
    run.fault(signal.SIGKILL, "worker-0")
    record = RunFolder(tmp_path / "run")
    wait_until(lambda: record.read_config().workers == 1, PATIENCE, "the run goes on with one worker")
    assert join(tmp_path) == 0
    end(tmp_path, run)
    summary = record.read_summary()
    assert (summary.status, record.read_config().workers) == ("finished", 2)
    assert summary.notes[0].startswith("worker 0 was killed by SIGKILL")
    assert any(note.startswith("1 worker joined; the run continued from step ") for note in summary.notes)


REFUSED = [
    (["bucketed(accumulate=2)"], "its workers step once more at the end"),
    (["scatter_reduce"], "each worker holds a slice of the state of the script's optimizer"),
    (["ensemble"], "no rule determines the model of a new worker"),
]


@pytest.mark.parametrize(("strategy", "said"), [(words[0], said) for words, said in REFUSED])
def test_a_script_whose_workers_cannot_change_is_refused_before_its_first_step(
    strategy: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "go").touch()
    words = ["launch", "-n", "2", *ELASTIC, write_script(tmp_path), strategy, "1"]
    ended = RealRun(words, tmp_path / "run", torch=True).end()
    assert ended.code != 0
    assert said in ended.err
    assert "leave out --min-workers and --max-workers" in ended.err
    assert not (tmp_path / "count-0").exists()


def test_workers_that_cannot_join_a_script_are_refused_and_the_run_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Path(write_script(tmp_path))
    silent = script.read_text().replace("flockstep.checkpoint(", "dict(")
    script.write_text(silent)
    words = ["launch", "-n", "2", *ELASTIC, str(script), "all_reduce", str(EPOCHS)]
    run = RealRun(words, tmp_path / "run", torch=True)
    run.wait_for_work(5)
    assert join(tmp_path, 3) == 2
    assert "the scripts of workers 0 and 1 have not called flockstep.checkpoint" in capsys.readouterr().err
    record = end(tmp_path, run)
    assert record.read_config().workers == 2
    assert not (record.path / "checkpoints").exists(), "no node was stopped"
    idle = "--max-workers has no effect so far, because the scripts of workers 0 and 1 have not called flockstep."
    assert run.err.count(idle) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-workers", "1"], "max_workers must be >= 2, the number of workers, got 1; raise it"),
        (
            ["--max-workers", "3", "--nodes", "2", "--node-rank", "0", "--coordinator", "127.0.0.1:29400"],
            "the number of a script's workers changes during the run only if all processes are on one machine",
        ),
    ],
)
def test_bad_options_are_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secret").write_text("a secret of sixteen letters or more")
    (tmp_path / "secret").chmod(0o600)
    more = ["--secret-file", str(tmp_path / "secret")] if "--nodes" in words else []
    assert (
        run_command(
            ["launch", "-n", "2", *words, *more, "--out", str(tmp_path / "run"), write_script(tmp_path), "asgd", "1"]
        )
        == 2
    )
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_strategy_that_goes_back_to_a_checkpoint_needs_checkpoints(tmp_path: Path) -> None:
    words = ["launch", "-n", "2", "--min-workers", "1", write_script(tmp_path), "dpsgd", "1"]
    ended = RealRun(words, tmp_path / "run", torch=True).end()
    assert ended.code == 2
    assert "min_workers needs checkpoints" in ended.err
    assert not (tmp_path / "count-0").exists()


def test_a_worker_of_a_script_that_gets_sigterm_leaves_after_a_checkpoint(tmp_path: Path) -> None:
    run = begin(tmp_path, "ps(bsp)", "--min-workers", "1", "--checkpoint-every", "1000")
    run.fault(signal.SIGTERM, "worker-1")
    record = RunFolder(tmp_path / "run")
    wait_until(lambda: record.read_config().workers == 1, PATIENCE, "the run goes on with one worker")
    note = end(tmp_path, run).read_summary().notes[0]
    assert re.match("worker 1 left after SIGTERM; the other workers continued from step (2[5-9]|[3-9][0-9])", note)


@pytest.mark.parametrize("strategy", ["ps(bsp)", "all_reduce"])
def test_workers_that_are_killed_at_once_are_one_change(strategy: str, tmp_path: Path) -> None:
    words = ["launch", "-n", "3", "--min-workers", "1", "--checkpoint-every", "20"]
    script = [write_scheduled_script(tmp_path), strategy, "step", "240"]
    run = RealRun([*words, *script], tmp_path / "run", torch=True)
    run.wait_for_work(25)
    os.kill(run.nodes["worker-2"], signal.SIGKILL)
    run.fault(signal.SIGKILL, "worker-0")
    record = RunFolder(tmp_path / "run")
    wait_until(lambda: record.read_config().workers < 3 or not run.going(), PATIENCE, "the run goes on")
    assert record.read_config().workers == 1
    end_scheduled_script(tmp_path)
    ended = run.end()
    assert ended.code == 0, ended.err
    summary = record.read_summary()
    assert summary.status == "finished"
    assert {one.node for one in summary.lost} == {0, 2}
    (change,) = [note for note in summary.notes if "; the other workers continued " in note]
    assert all(f"worker {rank} was killed by SIGKILL" in change for rank in (0, 2))
