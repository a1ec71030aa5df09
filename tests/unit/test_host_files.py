"""Files with the states of nodes that travel between the coordinator and the agents of other hosts."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from flockstep.errors import ProtocolError
from flockstep.launchers.host_files import PART, HostFiles
from flockstep.launchers.host_messages import PartOf
from flockstep.launchers.hosts import Arriving
from flockstep.records.checkpoints import ArrivingShard, Shard, shard_file

SIZES = [0, 1, PART - 1, PART, PART + 1, 3 * PART]


def fetched(files: HostFiles, path: str) -> list[tuple[PartOf, bytes]]:
    files.fetch(path)
    return list(files.parts())


@pytest.mark.parametrize("size", SIZES)
def test_a_file_comes_back_whole_and_is_removed(size: int, tmp_path: Path) -> None:
    files, data = HostFiles(tmp_path), os.urandom(size)
    for start in range(0, size + 1, PART):
        files.store(PartOf("from-run/a", start + PART > size), memoryview(data)[start : start + PART])
    assert (tmp_path / "from-run/a").read_bytes() == data
    parts = fetched(files, "from-run/a")
    assert b"".join(part for _, part in parts) == data
    assert [message.last for message, _ in parts] == [False] * (len(parts) - 1) + [True]
    assert not files.waiting
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    (told,) = fetched(HostFiles(tmp_path), "000001/worker-1.safetensors")
    assert told == (PartOf("000001/worker-1.safetensors", True, "No such file or directory"), b"")


@pytest.mark.parametrize("path", ["../a", "/etc/passwd", "a/../../b", ""])
def test_paths_outside_of_the_folder_are_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="is not in the folder of this agent"):
        HostFiles(tmp_path).store(PartOf(path, True), memoryview(b""))


def arriving(folder: Path, data: bytes) -> tuple[Arriving, list[str]]:
    told: list[str] = []
    shard = Shard(1, shard_file(1), 20, len(data), hashlib.sha256(data).hexdigest())
    return Arriving(ArrivingShard(folder, shard), told.append), told


def test_a_state_that_has_arrived_is_complete(tmp_path: Path) -> None:
    data = os.urandom(1000)
    one, told = arriving(tmp_path, data)
    assert not one.take(PartOf("a", False), memoryview(data)[:600])
    assert list(tmp_path.glob("*.safetensors")) == []
    assert one.take(PartOf("a", True), memoryview(data)[600:])
    assert told == [""]
    assert (tmp_path / shard_file(1)).read_bytes() == data


@pytest.mark.parametrize("change", ["byte", "short", "twice"])
def test_a_state_that_arrives_changed_is_refused(change: str, tmp_path: Path) -> None:
    data = os.urandom(1000)
    got = {"byte": data[:-1] + bytes([data[-1] ^ 1]), "short": data[:-1], "twice": data + data}[change]
    one, told = arriving(tmp_path, data)
    assert one.take(PartOf("a", True), memoryview(got))
    assert told == ["worker-1.safetensors did not arrive as worker 1 wrote it"]
    assert list(tmp_path.iterdir()) == []


def test_why_a_host_cannot_send_a_state_is_told(tmp_path: Path) -> None:
    one, told = arriving(tmp_path, b"x")
    assert one.take(PartOf("a", True, "No such file or directory"), memoryview(b""))
    assert told == ["No such file or directory"]
    assert list(tmp_path.iterdir()) == []
