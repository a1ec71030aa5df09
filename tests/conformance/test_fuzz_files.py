"""Damaged frames, checkpoints, records and other files: an error of flockstep or a value, in bounded memory."""

from __future__ import annotations

import json
import random
import runpy
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from flockstep.records import checkpoints as disk
from support.damage import Attempt, attempt
from support.files import SUBJECTS, Subject, damaged_files, sign_manifest, write_all
from support.frames import Bus, Frames, damaged_frames, frames

FACTOR, SLACK = 60, 1 << 20
"""Memory that reading an input may take: so many times the bytes of the input, and so many bytes more."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("written"))


@contextmanager
def traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def check_damage(name: str, folder: Path, place: Path, count: int) -> None:
    refused = 0
    with traced():
        for found, size in damaged_files(name, folder, place, count, seed=0):
            if found.peak > FACTOR * size + SLACK:  # it may have loaded something
                found = attempt(name, found.number, found.data, partial(SUBJECTS[name].read, place / "copy"))
            assert found.error is None, str(found)
            assert found.peak <= FACTOR * size + SLACK, f"{found.peak} bytes: {found}"
            refused += not found.taken
    assert refused > count // 20, f"{name}: only {refused} of {count} damaged files were refused"


@pytest.mark.parametrize("name", SUBJECTS)
def test_damaged_files_are_refused_or_read(name: str, written: Path, tmp_path: Path) -> None:
    check_damage(name, written, tmp_path, 24)


def trusting(folder: Path) -> object:
    """Wrong reader: allocates what the manifest announces."""
    manifest = disk.read_manifest(disk.folders(folder)[-1])
    return np.zeros(max(shard.nbytes for shard in manifest.shards) % (1 << 27), np.uint8).tobytes()


def test_a_reader_that_trusts_a_file_is_caught(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        SUBJECTS, "unchecked", Subject("summary.json", lambda f: json.loads((f / "summary.json").read_bytes()))
    )
    with pytest.raises(
        AssertionError, match=r"unchecked, number .*: (JSONDecodeError|UnicodeDecodeError|RecursionError)"
    ):
        check_damage("unchecked", written, tmp_path / "unchecked", 60)
    file = SUBJECTS["manifest"].file
    monkeypatch.setitem(SUBJECTS, "trusting", Subject(file, trusting, announce_much, sign_manifest))
    with pytest.raises(AssertionError, match=r"bytes: trusting, number "):
        check_damage("trusting", written, tmp_path / "trusting", 60)


def announce_much(data: bytes, draw: random.Random) -> bytes:
    manifest = json.loads(data)
    draw.choice(manifest["shards"])["nbytes"] = draw.randrange(1 << 25, 1 << 26)
    return json.dumps(manifest).encode()


def check_frames(name: str, subject: Frames, count: int) -> None:
    draw = random.Random(name)
    with traced():
        found = list(damaged_frames(name, subject, count, draw))
        again = [
            attempt(name, one.number, one.data, partial(subject.read, one.data, draw))
            for one in found
            if one.peak > limit_of(one)  # it may have loaded something
        ]
    wrong = [str(one) for one in [*found, *again] if one.error is not None]
    assert wrong == []
    assert [f"{one.peak} bytes of memory: {one}" for one in again if one.peak > limit_of(one)] == []
    assert sum(not one.taken for one in found) > count // 5


def limit_of(found: Attempt) -> int:
    return FACTOR * len(found.data) + (1 << 18)


@pytest.mark.parametrize("name", frames())
def test_damaged_frames_are_refused_or_messages(name: str) -> None:
    """Frames of every kind: of each strategy's messages, of the drivers, the supervisor, hosts and the handshake."""
    check_frames(name, frames()[name], 150)


@pytest.mark.parametrize("name", frames())
def test_a_sound_frame_is_read(name: str) -> None:
    subject = frames()[name]
    for data in subject.sound if not name.startswith("handshake") else ():  # its proof is never right
        draws = [random.Random(number) for number in range(9)]  # which choose the payload, too
        assert any(attempt(name, 0, data, partial(subject.read, data, draw)).taken for draw in draws), data


def test_what_is_said_to_a_bus_that_listens_is_refused_or_a_message(tmp_path: Path) -> None:
    bus = Bus(tmp_path)
    try:
        check_frames("bus", bus.frames(), 200)
    finally:
        bus.close()


DEEP = b"\x91" * 3000
FOUND = [("messages of hosts", b"\x81\xa4" + DEEP), ("messages of hosts", b"\x83\xa4typ,e\xa4" + DEEP)]
"""Frames with which reading once raised an error that was none of flockstep's."""
GRAPHS = [
    ("graph", b'{"nodes": [{"id": 0}, {"id": 1}, {"id": 2}, "inf"], "edges": 2}'),
    ("graph", b"[" * 9000),
    ("graph in GraphML", b"<?xml version='1.0' encoding='uNaNtf-8'?><graphml/>"),
]
"""The same for files."""


@pytest.mark.parametrize(("name", "data"), FOUND)
def test_a_frame_that_once_raised_another_error_is_refused(name: str, data: bytes) -> None:
    found = attempt(name, 0, data, partial(frames()[name].read, data, random.Random(0)))
    assert (found.taken, found.error) == (False, None)


@pytest.mark.parametrize(("name", "data"), GRAPHS)
def test_a_file_that_once_raised_another_error_is_refused(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / SUBJECTS[name].file).write_bytes(data)
    found = attempt(name, 0, data, partial(SUBJECTS[name].read, tmp_path))
    assert (found.taken, found.error) == (False, None)


def raises(data: bytes, draw: random.Random) -> None:
    """Wrong reader: raises what is not flockstep's."""
    raise KeyError(data)


def keeps(data: bytes, draw: random.Random, kept: list[bytearray] = []) -> None:  # noqa: B006 - it is meant to stay
    """Wrong reader: keeps memory of every input."""
    kept.append(bytearray(1 << 20))


@pytest.mark.parametrize(("read", "code"), [(raises, 1), (keeps, 1), (lambda data, draw: None, 0)])
def test_the_command_fails_where_an_input_is_neither_refused_nor_read_or_memory_grows(
    read: Callable[[bytes, random.Random], object], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "fuzz.py"))
    monkeypatch.setitem(tool["main"].__globals__, "frames", lambda: {"planted": Frames((b"x" * 9,), read, False)})
    monkeypatch.setattr("sys.argv", ["fuzz.py", "--frames", "40", "--files", "0", "--only", "planted"])
    assert tool["main"]() == code
