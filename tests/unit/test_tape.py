"""The file with what entered a node's program."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flockstep.errors import ConfigurationError, RunError
from flockstep.records.tape import (
    GROWTH,
    GradientEntry,
    MappedFile,
    MessageEntry,
    Reading,
    Said,
    SnapshotEntry,
    TapeEntry,
    TapeHeader,
    TapeWriter,
    note_as_json,
    read_tape,
)

HEADER = TapeHeader(1, 2, (0, 1, 3), ((0, 1), (3,)), servers=2, memory=True, host_memory=False, spec="{}")
STEPS = st.integers(0, 1 << 20)
CHECKS = st.lists(st.integers(0, (1 << 32) - 1), max_size=16).map(tuple)
ENTRIES = st.lists(
    st.one_of(
        st.builds(MessageEntry, STEPS, st.integers(-1000, 1 << 29), st.integers(0, 1 << 20)),
        st.builds(Said, STEPS, st.sampled_from(["lost", "again"]), st.text(max_size=20)),
        st.builds(Reading, STEPS, st.floats(allow_nan=False)),
        st.builds(GradientEntry, STEPS, st.none() | st.floats(allow_nan=False), CHECKS),
        st.builds(SnapshotEntry, STEPS, st.integers(0, 1 << 62), st.integers(0, 1 << 20), CHECKS),
    )
)


def written(path: Path, entries: list[TapeEntry]) -> MappedFile:
    file = MappedFile(path)
    writer = TapeWriter(file, HEADER)
    for one in entries:
        match one:
            case MessageEntry():
                writer.heard(one.place, one.source, one.number)
            case Said():
                writer.said(one.place, one.tag, one.text)
            case Reading():
                writer.reading(one.place, one.seconds)
            case GradientEntry():
                writer.gradient(one.place, one.loss, b"".join(check.to_bytes(4, "little") for check in one.checks))
            case SnapshotEntry():
                checks = b"".join(check.to_bytes(4, "little") for check in one.checks)
                writer.snapshot(one.place, one.tick, one.step, checks)
    return file


@given(ENTRIES)
def test_what_was_written_is_read(tmp_path_factory: pytest.TempPathFactory, entries: list[TapeEntry]) -> None:
    entries.sort(key=lambda one: one.place)
    path = tmp_path_factory.mktemp("tape") / "worker-1.tape"
    file = written(path, entries)
    header, found = read_tape(path)
    assert (header, list(found)) == (HEADER, entries), "as a killed process leaves it"
    file.close()
    assert list(read_tape(path)[1]) == entries


def test_a_message_takes_two_bytes(tmp_path: Path) -> None:
    entries: list[TapeEntry] = [MessageEntry(2 * n, n % 5 - 1, n // 5 + 1) for n in range(GROWTH)]
    written(tmp_path / "a", entries).close()
    written(tmp_path / "none", []).close()
    assert list(read_tape(tmp_path / "a")[1]) == entries
    assert (tmp_path / "a").stat().st_size - (tmp_path / "none").stat().st_size == 2 * GROWTH


def test_a_file_that_ends_within_an_entry_is_damaged(tmp_path: Path) -> None:
    written(tmp_path / "a", [Reading(3, 0.5)]).close()
    (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes()[:-1])
    with pytest.raises(ConfigurationError, match="its last entry needs 1 more bytes"):
        list(read_tape(tmp_path / "a")[1])


def test_a_disk_without_room_ends_the_run_with_the_path() -> None:
    with pytest.raises(RunError, match=r"/dev/full cannot be written: No space left on device; free some space"):
        MappedFile(Path("/dev/full"))


def test_a_tape_holds_no_secret() -> None:
    text = note_as_json({"spec": '{"run":"a","secret":"0123"}', "config": "", "wait": 0})
    assert "0123" not in text
    assert '\\"run\\":\\"a\\"' in text
