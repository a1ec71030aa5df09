"""A full disk ends a run with the path of the file that the disk did not take."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flockstep.arrays.schema import Schema
from flockstep.errors import RunError
from flockstep.records.events import LostEvent
from flockstep.records.folder import EventWriter, RunFolder, read_event_file
from support.disks import small_disk

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def test_a_writer_names_the_file_and_the_way_to_go_on(tmp_path: Path) -> None:
    record = RunFolder(tmp_path / "run")
    file = record.node_events_file(0)
    file.parent.mkdir(parents=True)
    file.symlink_to("/dev/full")
    rule = f"{file} could not be written: No space left on device; .* flockstep resume {record.path}"
    with EventWriter(file) as writer, pytest.raises(RunError, match=rule):
        writer.write(LostEvent(0.0, 0, "gone"))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    with small_disk(tmp_path / "small") as where:
        yield where


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_events_end_with_a_whole_line_and_a_result_is_whole_or_not_there(small: Path) -> None:
    record = RunFolder(small / "run")
    with EventWriter(record.node_events_file(0)) as writer:
        for step in range(5000):
            with contextlib.suppress(RunError):
                writer.write(LostEvent(float(step), 0, "a reason of some length"))
    events = read_event_file(record.node_events_file(0))
    assert 100 < len(events) < 5000
    assert record.merge_events() == events
    with pytest.raises(OSError, match=f"No space left on device: '{record.path}/"):
        record.write_result(np.arange(100_000, dtype="float32"), Schema.of({"w": (100_000,)}, "float32"))
    assert [file.name for file in record.path.iterdir()] in (["events"], ["events", "schema.json"])


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_standard_output_is_named_and_the_record_is_whole(unbuffered: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from flockstep.cli import main; main()",
        "simulate",
        "softmax",
        "-s",
        "all_reduce",
    ]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [*command, "-n", "2", "--steps", "2", "--out", str(tmp_path / "run")],
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stderr == (
        "flockstep: cannot write to standard output: No space left on device; free space on its disk, or send the "
        "output to another place\n"
    )
    assert RunFolder(tmp_path / "run").read_summary().status == "finished"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_healthy_standard_output_gets_no_line_of_ours(unbuffered: str) -> None:
    code = "from flockstep.cli.app import _say; import errno; _say(OSError(errno.ENOSPC, 'full'), 1, False)"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout == ""
    assert ended.stderr.startswith("flockstep: cannot use: full; ")


def test_only_a_full_disk_is_to_be_freed() -> None:
    """A closed pipe has no disk that could be freed."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        code = "from flockstep.cli.app import _say; print(); _say(BrokenPipeError(32, 'Broken pipe'), 1, False)"
        ended = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONUNBUFFERED": ""},
            stdout=gone,
            stderr=subprocess.PIPE,
            text=True,
            check=True,
        )
    assert ended.stderr == (
        "flockstep: cannot write to standard output: Broken pipe; send the output to another place\n"
    )
