"""Workers of another host, a network namespace, join a run that is going on, leave it, and are lost."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flockstep.cli.app import run as run_command
from flockstep.records import checkpoints as disk
from flockstep.records.config import RunConfig
from flockstep.records.events import StepEvent
from flockstep.records.folder import RunFolder
from flockstep.strategies.base import Strategy
from support.hosts import PORT, Ended, Host, network
from support.jobs import go_on, paced, paced_train
from support.matrix import few
from support.processes import PATIENCE, RealRun, content, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs network namespaces")

STEPS = 120


@pytest.fixture
def two() -> Iterator[list[Host]]:
    with network(2) as hosts:
        yield hosts


def begin(two: list[Host], folder: Path, strategy: str, *more: str) -> subprocess.Popen[str]:
    """A run of two workers on the first host, with a port for other hosts."""
    command, *words = paced_train(folder, strategy, 2, STEPS, slow_after=40)
    where = ["--coordinator", f"{two[0].address}:{PORT}", "--out", str(folder / "run")]
    return two[0].start(command, *words, "--max-workers", "4", *where, *more)


def join(two: list[Host], *more: str | Path) -> subprocess.Popen[str]:
    return two[1].start("join", f"{two[0].address}:{PORT}", *more)


def steps(folder: Path, rank: int) -> int:
    return content(folder / "run" / "events" / f"worker-{rank}.jsonl").count(b'"type":"step"')


def wait_for_steps(folder: Path, run: subprocess.Popen[str], workers: int, count: int) -> None:
    def there() -> bool:
        return all(steps(folder, rank) >= count for rank in range(workers)) or run.poll() is not None

    wait_until(there, PATIENCE, f"{count} steps of {workers} workers")
    assert run.poll() is None, Ended.of(run)


def wait_for_workers(folder: Path, run: subprocess.Popen[str], workers: int) -> None:
    """Wait until the run continues with this number of workers, each of which takes a step."""
    record = RunFolder(folder / "run")

    def changed() -> bool:
        there = record.read_config().workers == workers and all(steps(folder, rank) for rank in range(workers))
        return there or run.poll() is not None

    wait_until(changed, PATIENCE, f"the run continues with {workers} workers")
    assert run.poll() is None, Ended.of(run)


@pytest.mark.parametrize(
    ("strategy", "workers"),
    few(
        [("all_reduce", 1), ("gossip(0.5)", 2), ("easgd(4)", 1), ("asgd", 1), ("ps(bsp, shards=2)", 2)],
        ("all_reduce", 1),
    ),
)
def test_workers_of_another_host_join_a_run_that_is_going_on(
    strategy: str, workers: int, two: list[Host], tmp_path: Path
) -> None:
    run = begin(two, tmp_path, strategy)
    wait_for_steps(tmp_path, run, 2, 25)
    other = join(two, "-n", str(workers))
    total = 2 + workers
    wait_for_workers(tmp_path, run, total)
    assert {f"worker-{rank}" for rank in range(2, total)} <= set(two[1].processes())
    go_on(tmp_path)
    ended = [Ended.of(run), Ended.of(other)]
    assert [one.code for one in ended] == [0, 0], ended
    assert f"the run continues with {total} workers from step " in ended[1].err
    record = RunFolder(tmp_path / "run")
    summary, config = record.read_summary(), record.read_config()
    assert (summary.status, config.workers, config.steps) == ("finished", total, -(-2 * STEPS // total))
    assert summary.notes[0].startswith(f"{workers} worker{'s' * (workers > 1)} joined; the run continued from step")
    assert summary.notes[0].endswith("; 0 recorded steps were repeated")
    if Strategy.parse(config.strategy).traits.alike:
        assert len(set(summary.hashes.values())) == 1, "the newcomers have the bits of the others"
    wait_until(lambda: not any(host.processes() for host in two), PATIENCE, "no process is left")


@pytest.mark.full
def test_a_run_that_another_host_joins_ends_with_the_bits_of_one_that_was_stopped_and_resumed(
    two: list[Host], tmp_path: Path
) -> None:
    run = begin(two, tmp_path, "all_reduce(ring)", "--keep", "1000")
    wait_for_steps(tmp_path, run, 2, 25)
    other = join(two)
    wait_for_workers(tmp_path, run, 3)
    go_on(tmp_path)
    ended = [Ended.of(run), Ended.of(other)]
    assert [one.code for one in ended] == [0, 0], ended
    record = RunFolder(tmp_path / "run")
    joined = record.read_result()[0].tobytes()
    of_two = [folder for folder in disk.folders(record.path) if disk.read_manifest(folder).workers == 2]
    for folder in disk.folders(record.path):
        if folder not in of_two:
            disk.remove(folder)
    text = disk.kept_config(record.path, disk.read_manifest(of_two[-1]).config)
    assert text is not None
    config = RunConfig.from_toml(text, "the configuration of two workers")
    disk.keep_config(record.path, config.digest, text)
    record.write_config(config)
    record.summary_file.unlink()
    record.result_file.unlink()
    again = Ended.of(two[0].start("resume", record.path, "-n", "3"))
    assert again.code == 0, again
    assert record.read_result()[0].tobytes() == joined


def test_a_host_that_is_stopped_leaves_and_one_whose_worker_dies_goes_back(two: list[Host], tmp_path: Path) -> None:
    """Both change the workers of a run over two hosts; states travel in both directions."""
    run = begin(two, tmp_path, "ps(bsp)", "--min-workers", "1", "--checkpoint-every", "5")
    wait_for_steps(tmp_path, run, 2, 10)
    other = join(two, "-n", "2")
    wait_for_workers(tmp_path, run, 4)
    wait_for_steps(tmp_path, run, 4, steps(tmp_path, 3) + 8)
    two[1].run("pkill", "-KILL", "-x", "worker-3", "--ns", str(two[1].first), "--nslist", "net")
    wait_for_workers(tmp_path, run, 3)
    other.send_signal(signal.SIGTERM)
    wait_for_workers(tmp_path, run, 2)
    assert Ended.of(other).code == 0
    wait_until(lambda: not two[1].processes(), PATIENCE, "no process is left there")
    go_on(tmp_path)
    ended = Ended.of(run)
    assert ended.code == 0, ended
    notes = RunFolder(tmp_path / "run").read_summary().notes
    assert any(note.startswith("worker 3 was killed by SIGKILL") for note in notes), notes
    assert any(note.startswith("worker 2 left after SIGTERM; ") for note in notes), notes


@pytest.mark.full
def test_a_host_that_vanishes_takes_its_workers_along_and_the_run_goes_back(two: list[Host], tmp_path: Path) -> None:
    more = ["--min-workers", "1", "--checkpoint-every", "5", "--link-timeout", "2"]
    run = begin(two, tmp_path, "all_reduce", *more)
    wait_for_steps(tmp_path, run, 2, 10)
    other = join(two, "-n", "2")
    wait_for_workers(tmp_path, run, 4)
    wait_for_steps(tmp_path, run, 4, steps(tmp_path, 3) + 8)
    two[1].cut()
    wait_for_workers(tmp_path, run, 2)
    assert Ended.of(other).code == 1
    go_on(tmp_path)
    ended = Ended.of(run)
    assert ended.code == 0, ended
    events = RunFolder(tmp_path / "run").read_events()
    assert {event.rank for event in events if isinstance(event, StepEvent)} >= {0, 1}


def test_a_host_that_cannot_join_is_told_and_the_run_continues(two: list[Host], tmp_path: Path) -> None:
    run = begin(two, tmp_path, "gossip(0.5)")
    wait_for_steps(tmp_path, run, 2, 5)
    most = Ended.of(join(two, "-n", "3"))
    assert most.code == 2
    assert "the number of workers must be <= --max-workers 4, got 5; let fewer workers join" in most.err
    (tmp_path / "other").mkdir()
    changed = Path(paced(tmp_path / "other"))
    changed.write_text(changed.read_text() + "\n")
    refused = Ended.of(join(two, "--job", changed))
    assert refused.code == 2
    assert f"this host cannot join: job is {changed.name} (SHA-256" in refused.err
    stranger = Ended.of(two[1].start("join", f"{two[0].address}:{PORT}", FLOCKSTEP_SECRET="another secret of tests"))
    assert stranger.code == 2
    assert "did not admit this host" in stranger.err
    before = steps(tmp_path, 0)
    wait_until(lambda: steps(tmp_path, 0) > before + 1 or run.poll() is not None, PATIENCE, "further steps")
    go_on(tmp_path)
    ended = Ended.of(run)
    assert ended.code == 0, ended
    assert not (tmp_path / "run" / "checkpoints").exists(), "no node was stopped"


@pytest.mark.full
def test_a_run_without_max_workers_takes_no_worker_of_another_host(two: list[Host], tmp_path: Path) -> None:
    where = ["--nodes", "2", "--coordinator", f"{two[0].address}:{PORT}"]
    words = ["softmax", "-s", "gossip", "-n", "2", "--steps", "100000"]
    runs = [
        two[0].start("train", *where, "--node-rank", "0", "--out", tmp_path / "run", *words),
        two[1].start("train", *where, "--node-rank", "1", *words),
    ]
    wait_for_steps(tmp_path, runs[0], 2, 5)
    refused = Ended.of(join(two))
    assert refused.code == 2
    assert (
        "workers of another host join only a run of flockstep train that was started with --max-workers" in refused.err
    )
    runs[0].send_signal(signal.SIGINT)
    assert [Ended.of(one).code for one in runs] == [130, 1]


def test_options_of_other_hosts_are_refused_for_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = RealRun(["train", "softmax", "-s", "asgd", "-n", "1", "--steps", "2"], tmp_path / "run").end()
    assert ended.code == 0
    assert run_command(["join", str(tmp_path / "run"), "--host-address", "10.0.0.1"]) == 2
    assert "--host-address 10.0.0.1 applies only to a run on another host, and" in capsys.readouterr().err
