"""A launched script that is killed anywhere and resumed ends as the script that was not killed."""

from __future__ import annotations

import re
import shutil
import signal
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from flockstep.records import checkpoints as disk
from flockstep.records.events import StepEvent
from flockstep.records.folder import RunFolder
from flockstep_lab.chaos.base import Failpoint
from flockstep_lab.chaos.failpoint import signalled, write_failpoint
from support.disks import fill, small_disk
from support.matrix import few
from support.processes import PATIENCE, Ended, RealRun, wait_until
from support.torch_scripts import write_script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes by their names in /proc")

RESUME = Path(__file__).parents[2] / "docs/how-to/resume.md"
Uninterrupted = Callable[..., list[Any]]
EPOCHS = 12
STEPS = 10 * EPOCHS
KILLS = [
    ("all_reduce", "worker-1", "gradient.computed", 70),
    ("all_reduce", "worker-1", "state.before_copy", 2),
    ("all_reduce", "worker-0", "shard.written", 2),
    ("all_reduce", "worker-1", "shard.renamed", 2),
    ("all_reduce", "launcher", "checkpoint.begun", 2),
    ("all_reduce", "launcher", "states.copied", 2),
    ("all_reduce", "launcher", "manifest.begun", 2),
    ("all_reduce", "launcher", "manifest.renamed", 2),
    ("all_reduce", "launcher", "checkpoint.complete", 2),
    ("all_reduce", "worker-0", "gradient.computed", STEPS),
    ("all_reduce", "launcher", "run.ended", 1),
    ("ps(bsp)", "worker-0", "gradient.computed", 70),
    ("ps(bsp, shards=2)", "worker-1", "shard.written", 2),
    ("local_sgd(8)", "worker-0", "gradient.computed", 70),
    ("local_sgd(8)", "worker-1", "shard.written", 2),
    ("local_sgd(8)", "launcher", "states.copied", 3),
    ("dpsgd(ring)", "launcher", "checkpoint.complete", 2),
    ("easgd_sync(period=4)", "launcher", "manifest.begun", 2),
    ("easgd_sync(period=4)", "launcher", "run.ended", 1),
]
"""Strategy, process, point of the code, and the number of times that the process reaches the point until it ends."""


def begin(folder: Path, strategy: str, *more: str, epochs: int = EPOCHS, record: Path | None = None) -> RealRun:
    words = ["launch", "-n", "2", *more, write_script(folder), strategy, str(epochs)]
    return RealRun(words, record or folder / "run", torch=True)


def resumed(folder: Path, record: Path | None = None) -> Ended:
    (folder / "go").touch()
    return RealRun(["resume"], record or folder / "run", torch=True).end()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    """The outcome of a run that was not stopped, by strategy and number of epochs."""

    @cache
    def run(strategy: str, epochs: int = EPOCHS) -> list[Any]:
        whole = tmp_path_factory.mktemp("whole")
        (whole / "go").touch()
        ended = begin(whole, strategy, epochs=epochs).end()
        assert ended.code == 0, ended.err
        return outcome(whole)

    return run


def outcome(folder: Path) -> list[Any]:
    """Parameters, buffers and momentum of both ranks at the end."""
    return [torch.load(folder / f"end-{rank}") for rank in range(2)]


def same(ours: list[Any], theirs: list[Any]) -> bool:
    return all(len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(ours, theirs, strict=True))


def check_record(record: Path, steps: int) -> None:
    """Every step of every worker is in the record once, in order."""
    for rank in range(2):
        events = RunFolder(record).read_events()
        found = [event.step for event in events if isinstance(event, StepEvent) and event.rank == rank]
        assert found == list(range(1, steps + 1))


@pytest.mark.full
def test_a_script_that_sigterm_stops_and_that_is_resumed_ends_with_the_bits_of_one_that_was_not_stopped(
    tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    """No checkpoint is due before the signal."""
    run = begin(tmp_path, "all_reduce")
    run.wait_for_work(20)
    run.fault(signal.SIGTERM, "main")
    ended = run.end()
    assert ended.code == 130
    least = min(disk.newest(tmp_path / "run").manifest.steps.values())
    assert f"; flockstep resume {(tmp_path / 'run').resolve()} continues from step {least}\n" in ended.err
    again = resumed(tmp_path)
    assert again.code == 0, again.err
    assert again.summary is not None
    assert again.summary["notes"][0].startswith(f"resumed from step {least}; ")
    assert [(tmp_path / f"steps-{rank}").read_text() for rank in range(2)] == [str(STEPS - least)] * 2
    assert same(outcome(tmp_path), uninterrupted("all_reduce"))
    check_record(tmp_path / "run", STEPS)


@pytest.mark.parametrize(
    ("strategy", "who", "point", "number"), few(KILLS, ("all_reduce", "launcher", "manifest.begun", 2))
)
def test_a_script_killed_at_a_point_and_resumed_ends_with_the_bits_of_one_that_was_not(
    strategy: str, who: str, point: str, number: int, tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    kill = write_failpoint(tmp_path, Failpoint(who, point, number))
    options = "--rank-output", str(tmp_path / "said"), "--output", "rank0", "--prefix"
    ended = begin(tmp_path, strategy, "--checkpoint-every", "20", "--import", kill, *options).end()
    assert ended.code != 0
    assert signalled(tmp_path) is not None
    steps = disk.newest(tmp_path / "run").manifest.steps  # between two exchanges the workers' steps may differ
    least = min(steps.values())
    again = resumed(tmp_path)
    assert again.code == 0, again.err
    assert [ended.out, again.out] == [f"[rank 0] begins at epoch {epoch}\n" for epoch in (0, steps[0] // 10)]
    said = [f"begins at epoch {epoch}\n" for epoch in (0, steps[1] // 10)]
    assert (tmp_path / "said" / "rank-1.out").read_text() == "".join(said)
    assert again.summary is not None
    assert again.summary["notes"][0].startswith(f"resumed from step {least}; ")
    assert [(tmp_path / f"steps-{rank}").read_text() for rank in range(2)] == [
        str(STEPS - steps[rank]) for rank in range(2)
    ]
    assert same(outcome(tmp_path), uninterrupted(strategy))
    check_record(tmp_path / "run", STEPS)


@pytest.mark.parametrize(
    ("point", "number"), few([("shard.written", 2), ("update.applied", 70)], ("update.applied", 70))
)
def test_a_script_whose_server_is_killed_goes_back_to_its_checkpoint_and_ends_with_the_same_bits(
    point: str, number: int, tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    kill = write_failpoint(tmp_path, Failpoint("server-0", point, number))
    (tmp_path / "go").touch()
    ended = begin(tmp_path, "ps(bsp)", "--checkpoint-every", "20", "--import", kill).end()
    assert ended.code == 0, ended.err
    assert signalled(tmp_path) is not None
    assert "server 0 was killed by SIGKILL" in ended.err
    assert "; the workers, and new servers, continued from step " in ended.err
    assert same(outcome(tmp_path), uninterrupted("ps(bsp)"))
    check_record(tmp_path / "run", STEPS)


@pytest.mark.full
@pytest.mark.parametrize(("strategy", "who"), [("all_reduce", "worker-1"), ("gossip(0.5)", "main"), ("asgd", "main")])
def test_a_script_is_killed_between_two_checkpoints(
    strategy: str, who: str, tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    """SIGKILL, not at a point of the code; asynchronous strategies lose no step of the checkpoint."""
    run = begin(tmp_path, strategy, "--checkpoint-every", "20")
    wait_until(lambda: (tmp_path / "run/checkpoints/000003/manifest.json").exists(), PATIENCE, "three checkpoints")
    run.wait_for_work(70)
    run.fault(signal.SIGKILL, who)
    assert run.end().code != 0
    steps = disk.newest(tmp_path / "run").manifest.steps
    again = resumed(tmp_path)
    assert again.code == 0, again.err
    for rank in range(2):
        assert (tmp_path / f"steps-{rank}").read_text() == str(STEPS - steps[rank])
    assert RunFolder(tmp_path / "run").read_summary().steps == 2 * STEPS
    if strategy == "all_reduce":
        assert same(outcome(tmp_path), uninterrupted(strategy))


@pytest.mark.full
def test_after_a_full_disk_a_script_goes_on_from_the_previous_checkpoint(
    tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    epochs = 60
    with small_disk(tmp_path / "small", "2m") as place:
        record = place / "run"
        run = begin(tmp_path, "all_reduce", "--checkpoint-every", "20", epochs=epochs, record=record)
        wait_until(lambda: any(record.glob("checkpoints/*/manifest.json")), PATIENCE, "a checkpoint")
        fill(place / "filler")
        assert "could not be written: No space left on device" in run.end().err
        (place / "filler").unlink()
        again = resumed(tmp_path, record)
        assert again.code == 0, again.err
        assert same(outcome(tmp_path), uninterrupted("all_reduce", epochs))


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ps(bsp)", "all_reduce"])
def test_the_documented_script_saves_and_loads_model_optimizer_and_scheduler(strategy: str, tmp_path: Path) -> None:
    """On two ranks: 24 steps, then the rest from the file of step 20, end as 40 steps without a stop."""
    found = re.search(
        r"^```python title=\"save_and_load.py\"\n(.*?)^```$", RESUME.read_text(), re.DOTALL | re.MULTILINE
    )
    assert found is not None
    program = found[1].replace("ps(bsp)", strategy) + 'torch.save(state_of(), f"end-{flockstep.rank()}.pt")\n'
    program = program.replace("start = load()", f"{STATE_OF}\nstart = load()")
    ends = []
    for name, parts in [("whole", ["40"]), ("parts", ["24", "40"])]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "save_and_load.py").write_text(f"import os\nos.chdir({str(folder)!r})\n{program}")
        for part in parts:
            shutil.rmtree(folder / "run", ignore_errors=True)
            words = ["launch", "-n", "2", str(folder / "save_and_load.py"), part]
            ended = RealRun(words, folder / "run", torch=True).end()
            assert ended.code == 0, ended.err
        ends.append([torch.load(folder / f"end-{rank}.pt") for rank in range(2)])
        assert torch.load(folder / "state.pt")["step"] == 40
    whole, parts = ends
    assert same(whole, parts)
    assert not torch.equal(whole[0][0], torch.zeros(1))


STATE_OF = """
def state_of():
    rates = [torch.tensor([group["lr"] for group in optimizer.param_groups]), torch.tensor(scheduler.last_epoch)]
    return [*(value.clone() for value in model.state_dict().values()), *rates]
"""


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_all_processes_of_a_script_takes_a_checkpoint(kind: signal.Signals, tmp_path: Path) -> None:
    """No checkpoint is due before the signal, which `timeout`, a terminal that closes and systemd send to the group."""
    run = begin(tmp_path, "all_reduce")
    run.wait_for_work(20)
    run.fault(kind, "group")
    ended = run.end()
    assert ended.code == 130
    least = min(disk.newest(tmp_path / "run").manifest.steps.values())
    assert ended.err.endswith(f"; flockstep resume {(tmp_path / 'run').resolve()} continues from step {least}\n")
    assert "no checkpoint was taken" not in ended.err
