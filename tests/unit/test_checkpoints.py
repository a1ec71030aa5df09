"""Files of checkpoints: what is written is read, and whatever is damaged is refused with a sentence."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from flockstep import __version__
from flockstep.errors import ConfigurationError, ProtocolError
from flockstep.records import checkpoints as disk
from flockstep.records.config import CheckpointInterval
from flockstep.records.snapshots import Snapshot
from flockstep.runtime.state import from_arrays, to_arrays

ARRAYS = {
    "weights": np.arange(6, dtype=np.float32).reshape(2, 3),
    "none": np.empty((0, 4), np.float64),
    "flag": np.array(True),
    "counts": np.array([1, -2], np.int64),
    "short": np.array([1.5, -2], ml_dtypes.bfloat16),
}


def test_files_of_before_the_package_are_read(tmp_path: Path) -> None:
    """Byte for byte what flockstep 0.1 wrote, with the texts that the tools of PyTorch add to a header."""
    header = b'{"__metadata__":{"format":"pt"},"a":{"dtype":"I16","shape":[2],"data_offsets":[0,4]}}'
    header += b" " * (-len(header) % 8)
    assert of_bytes(tmp_path, len(header).to_bytes(8, "little") + header + b"\x01\x00\x02\x00") == {"a": [1, 2]}


def of_bytes(record: Path, data: bytes) -> dict[str, list[int]]:
    """The arrays of a checkpoint whose only file has these bytes, with a hash that is theirs."""
    folder = disk.new_folder(record)
    (folder / "worker-0.safetensors").write_bytes(data)
    shard = disk.Shard(0, "worker-0.safetensors", 5, len(data), hashlib.sha256(data).hexdigest())
    manifest = disk.Manifest(disk.FORMAT, __version__, "all_reduce", 1, "", 1.5, (shard,))
    return {name: array.tolist() for name, array in disk.Checkpoint(folder, manifest).arrays(0).items()}


def test_arrays_return_from_a_file_bit_for_bit(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    read = disk.newest(tmp_path).arrays(0)
    assert {name: (a.dtype, a.shape, a.tobytes()) for name, a in read.items()} == {
        name: (a.dtype, a.shape, a.tobytes()) for name, a in ARRAYS.items()
    }


def test_a_dtype_without_a_name_in_the_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match='dtype "complex128"'):
        disk.write_shard(tmp_path, 0, 5, {"x": np.zeros(1, np.complex128)})
    assert list(tmp_path.iterdir()) == []


def test_a_state_in_arrays_shares_no_memory_with_the_original() -> None:
    value = {"a": ARRAYS["weights"].copy(), "b": [1, "text", None]}
    arrays = to_arrays(value)
    value["a"][:] = 0  # type: ignore[index]
    read = from_arrays(arrays)
    assert read["b"] == [1, "text", None]
    assert (read["a"] == ARRAYS["weights"]).all()


@settings(max_examples=40)
@given(data=st.data())
def test_bytes_that_are_no_file_of_arrays_are_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = bytearray(save(ARRAYS))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    mutant = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    read: dict[str, list[int]] = {}
    with contextlib.suppress(ConfigurationError):
        read = of_bytes(tmp_path_factory.mktemp("run"), mutant)
    assert sum(map(np.size, read.values())) <= len(mutant), "no array holds more numbers than the file has bytes"


@given(st.data())
def test_a_mutated_structure_is_refused_or_is_data(data: st.DataObject) -> None:
    arrays = to_arrays({"a": ARRAYS["weights"], "b": (1.5, "x"), "c": {3, 4}})
    structure = bytearray(arrays["structure"].tobytes())
    structure[data.draw(st.integers(0, len(structure) - 1))] = data.draw(st.integers(0, 255))
    arrays["structure"] = np.frombuffer(bytes(structure), np.uint8)
    try:
        value = from_arrays(arrays)
    except ProtocolError:
        return
    assert "structure" in to_arrays(value)


def checkpoint(record: Path) -> Path:
    folder = disk.new_folder(record)
    shard = disk.write_shard(folder, 0, 5, ARRAYS)
    disk.write_manifest(folder, disk.Manifest(disk.FORMAT, __version__, "all_reduce", 1, "", 1.5, (shard,)))
    return folder


@settings(max_examples=40)
@given(at=st.integers(0, 10_000), value=st.integers(0, 255), cut=st.booleans())
def test_a_mutated_manifest_is_refused_or_says_the_same(
    at: int, value: int, cut: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = checkpoint(tmp_path_factory.mktemp("run"))
    right, file = disk.read_manifest(folder), folder / disk.MANIFEST
    data = bytearray(file.read_bytes())
    at %= len(data)
    data[at] = value
    file.write_bytes(data[:at] if cut else data)
    with contextlib.suppress(ConfigurationError):
        assert disk.read_manifest(folder) == right


def test_the_newest_complete_checkpoint_is_found_and_old_ones_go(tmp_path: Path) -> None:
    first, second, third = (checkpoint(tmp_path) for _ in range(3))
    (third / disk.MANIFEST).unlink()
    assert disk.newest(tmp_path).folder == second
    assert disk.newest(tmp_path).arrays(0)["counts"].tolist() == [1, -2]
    disk.prune(tmp_path, 1)
    assert disk.folders(tmp_path) == [second]
    assert not first.exists()
    assert disk.new_folder(tmp_path).name == "000003"


def test_folders_of_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    first = checkpoint(tmp_path)
    other = first.rename(first.with_name("000001-keep"))
    second = checkpoint(tmp_path)
    assert second.name == "000001"
    disk.prune(tmp_path, 1)
    assert (other / disk.MANIFEST).exists()
    assert disk.newest(tmp_path).folder == second


def with_snapshot(record: Path, name: str = "worker-0.30") -> Path:
    folder = disk.new_folder(record)
    (folder / "worker-0.30").write_bytes(b"1234")
    (kept,) = disk.keep_pending(folder, [Snapshot(30.0, 0, "worker-0.30", "float32", 1, 0, 1.0, 30, 0)])
    kept = msgspec.structs.replace(kept, snapshot=msgspec.structs.replace(kept.snapshot, path=name))
    shard = disk.write_shard(folder, 0, 5, ARRAYS)
    disk.write_manifest(folder, disk.Manifest(disk.FORMAT, __version__, "all_reduce", 1, "", 1.5, (shard,), (kept,)))
    return folder


def test_a_damaged_snapshot_is_refused(tmp_path: Path) -> None:
    file = with_snapshot(tmp_path) / "worker-0.30"
    assert disk.newest(tmp_path).manifest.pending[0].snapshot.path == file.name
    file.write_bytes(b"1235")
    with pytest.raises(
        ConfigurationError, match=r"worker-0\.30 is damaged: its bytes differ from those written; delete"
    ):
        disk.newest(tmp_path)
    file.unlink()
    with pytest.raises(ConfigurationError, match=r"worker-0\.30 cannot be read: No such file or directory; delete"):
        disk.newest(tmp_path)


@pytest.mark.parametrize("name", ["../worker-0.30", "/etc/passwd", "..", "", "a/b"])
def test_a_snapshot_outside_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is damaged"):
        disk.read_manifest(with_snapshot(tmp_path, name))


@pytest.mark.skipif(sys.platform != "linux", reason="finds open files through /proc")
def test_the_name_of_a_new_folder_is_synchronized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synchronized = list[str]()
    monkeypatch.setattr(
        os, "fsync", lambda opened: synchronized.append(str(Path(f"/proc/self/fd/{opened}").readlink()))
    )
    folder = disk.new_folder(tmp_path)
    assert str(folder.parent) in synchronized


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("500", CheckpointInterval(steps=500)),
        ("5min", CheckpointInterval(seconds=300)),
        ("1.5h", CheckpointInterval(seconds=5400)),
        ("30s", CheckpointInterval(seconds=30)),
    ],
)
def test_intervals_are_read(text: str, interval: CheckpointInterval) -> None:
    assert CheckpointInterval.parse(text) == interval
    assert interval.due(499, 29.9) is False
    assert interval.due(500, 5400) is True


@pytest.mark.parametrize("text", ["0", "-5", "5 minutes", "0s", "", "1.5"])
def test_what_is_no_interval_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="must be a number of steps or a time > 0"):
        CheckpointInterval.parse(text)
