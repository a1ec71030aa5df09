"""A launched script that is killed anywhere and resumed ends as the script that was not killed."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flockstep.chaos.base import Failpoint
from flockstep.chaos.failpoint import signalled, write_failpoint
from flockstep.records import checkpoints as disk
from flockstep.records.events import StepEvent
from flockstep.records.folder import RunFolder
from support.matrix import few
from support.processes import PATIENCE, Ended, RealRun, wait_until
from support.torch_scripts import write_script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes by their names in /proc")

EPOCHS = 12
STEPS = 10 * EPOCHS
KILLS = [
    ("all_reduce", "worker-1", "state.before_copy", 2),
    ("all_reduce", "worker-0", "shard.written", 2),
    ("all_reduce", "worker-1", "shard.renamed", 2),
    ("all_reduce", "launcher", "checkpoint.begun", 2),
    ("all_reduce", "launcher", "states.copied", 2),
    ("all_reduce", "launcher", "manifest.begun", 2),
    ("all_reduce", "launcher", "manifest.renamed", 2),
    ("all_reduce", "launcher", "checkpoint.complete", 2),
    ("ps(bsp)", "server-0", "shard.written", 2),
    ("ps(bsp, shards=2)", "worker-1", "shard.written", 2),
    ("local_sgd(8)", "worker-1", "shard.written", 2),
    ("local_sgd(8)", "launcher", "states.copied", 3),
    ("dpsgd(ring)", "launcher", "checkpoint.complete", 2),
    ("easgd_sync(period=4)", "launcher", "manifest.begun", 2),
]


def begin(folder: Path, strategy: str, *more: str) -> RealRun:
    words = ["launch", "-n", "2", "--checkpoint-every", "20", *more, write_script(folder)]
    return RealRun([*words, strategy, str(EPOCHS)], folder / "run", torch=True)


def resumed(folder: Path) -> Ended:
    (folder / "go").touch()
    return RealRun(["resume"], folder / "run", torch=True).end()


def uninterrupted(folder: Path, strategy: str) -> list[Any]:
    whole = folder / "whole"
    whole.mkdir()
    (whole / "go").touch()
    ended = begin(whole, strategy).end()
    assert ended.code == 0, ended.err
    return outcome(whole)


def outcome(folder: Path) -> list[Any]:
    """Parameters, buffers and momentum of both ranks at the end."""
    return [torch.load(folder / f"end-{rank}") for rank in range(2)]


def same(ours: list[Any], theirs: list[Any]) -> bool:
    return all(len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("strategy", "who", "point", "number"), few(KILLS, ("all_reduce", "launcher", "manifest.begun", 2))
)
def test_a_script_killed_at_a_point_and_resumed_ends_with_the_bits_of_one_that_was_not(
    strategy: str, who: str, point: str, number: int, tmp_path: Path
) -> None:
    run = begin(tmp_path, strategy, "--import", write_failpoint(tmp_path, Failpoint(who, point, number)))
    assert run.end().code != 0
    assert signalled(tmp_path) is not None
    least = min(disk.newest(tmp_path / "run").manifest.steps.values())
    again = resumed(tmp_path)
    assert again.code == 0, again.err
    assert again.summary is not None
    assert again.summary["notes"][0].startswith(f"resumed from step {least}; ")
    assert [(tmp_path / f"steps-{rank}").read_text() for rank in range(2)] == [str(STEPS - least)] * 2
    assert same(outcome(tmp_path), uninterrupted(tmp_path, strategy))
    for rank in range(2):
        events = RunFolder(tmp_path / "run").read_events()
        steps = [event.step for event in events if isinstance(event, StepEvent) and event.rank == rank]
        assert steps == list(range(1, STEPS + 1)), "every step is in the record once"


@pytest.mark.full
@pytest.mark.parametrize(("strategy", "who"), [("all_reduce", "worker-1"), ("gossip(0.5)", "main"), ("asgd", "main")])
def test_a_script_is_killed_between_two_checkpoints(strategy: str, who: str, tmp_path: Path) -> None:
    """SIGKILL, not at a point of the code; asynchronous strategies lose no step of the checkpoint."""
    run = begin(tmp_path, strategy)
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
        assert same(outcome(tmp_path), uninterrupted(tmp_path, strategy))
