"""A full disk does not end a run: events are dropped with one warning, results go elsewhere, and the path is said."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flockstep.arrays.schema import Schema
from flockstep.records import full_disk
from flockstep.records.events import LostEvent
from flockstep.records.folder import EventWriter, RunFolder, read_event_file
from support.disks import small_disk

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def test_a_writer_drops_events_with_one_warning_that_names_the_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "worker-0.jsonl"
    file.symlink_to("/dev/full")
    with EventWriter(file) as writer:
        for step in range(3):
            writer.write(LostEvent(float(step), 0, "gone"))
    said = capfd.readouterr().err
    assert said.count("flockstep: ") == 1
    assert str(file) in said
    assert os.strerror(errno.ENOSPC) in said


class Broken:
    """A file on a broken disk."""

    def write(self, data: bytearray) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_writer_raises_what_is_no_full_disk(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "worker-0.jsonl")
    file, writer._file = writer._file, Broken()  # type: ignore[assignment]
    with pytest.raises(OSError, match="Input/output error"):
        writer.write(LostEvent(0.0, 0, "gone"))
    writer._file = file
    writer.close()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    with small_disk(tmp_path / "small") as where:
        yield where


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_a_result_is_kept_elsewhere_and_events_end_with_a_whole_line(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    record = RunFolder(small / "run")
    with EventWriter(record.node_events_file(0)) as writer:
        for step in range(5000):
            writer.write(LostEvent(float(step), 0, "a reason of some length"))
    events = read_event_file(record.node_events_file(0))
    assert 100 < len(events) < 5000
    assert record.merge_events() == events
    params = np.arange(100_000, dtype="float32")
    record.write_result(params, Schema.of({"w": (100_000,)}, "float32"))
    (kept,) = (tmp_path / "elsewhere").glob("*/result.npy")
    assert np.array_equal(np.load(kept), params)
    assert np.array_equal(record.read_result()[0], params)  # through a link in the record
    said = capfd.readouterr().err
    assert f"{record.result_file} could not be written" in said
    assert str(kept) in said
    assert list(record.path.glob("*.half")) == []


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


def test_each_record_has_a_folder_of_its_own_for_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of one process whose folders have one name; nobody else can make, guess or write to such a folder."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    whole = full_disk.write_whole

    def full(path: Path, data: bytes) -> None:
        if elsewhere not in path.parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(path, data)

    monkeypatch.setattr(full_disk, "write_whole", full)
    for trial in ("a", "b"):
        (tmp_path / trial / "run").mkdir(parents=True)
        for name in ("summary.json", "result.npy"):
            full_disk.replace(tmp_path / trial / "run" / name, trial.encode())
    kept = list(elsewhere.iterdir())
    assert len(kept) == 2
    assert [folder.stat().st_mode & 0o777 for folder in kept] == [0o700, 0o700]
    for trial in ("a", "b"):
        assert (tmp_path / trial / "run" / "result.npy").read_text() == trial
        assert (tmp_path / trial / "run" / "summary.json").read_text() == trial


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
