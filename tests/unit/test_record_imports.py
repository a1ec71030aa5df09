"""Records from somebody else: none of their code is run unasked, and what cannot be is told in a sentence."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flockstep.cli.app import run
from flockstep.costs.cluster_file import load_cluster
from flockstep.errors import ConfigurationError
from flockstep.launchers.simulate import simulate
from flockstep.planning.check import check, for_report, measure
from flockstep.planning.fit import fit_records
from flockstep.planning.record_imports import NotAskedFor
from flockstep.records.config import RunConfig
from flockstep.records.folder import RunFolder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "run"
    network = "link(bandwidth='10mbit', latency=0.001)"
    config = RunConfig(
        kind="simulate", job="softmax", strategy="all_reduce", workers=3, steps=12, network=network,
        compute="constant(0.01)",
    )  # fmt: skip
    simulate(config, folder)
    return folder


@pytest.fixture
def record(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def edited(file: Path, old: str, new: str) -> None:
    text, count = re.subn(old, new, file.read_text(), count=1)
    assert count == 1
    file.write_text(text)


def named(record: Path, tmp_path: Path, more: str = "") -> tuple[Path, Path]:
    """A file that leaves a mark when it is run, named by the record; and the mark."""
    file, mark = tmp_path / "stranger.py", tmp_path / "mark"
    file.write_text(f"from pathlib import Path\nPath({str(mark)!r}).write_text('was here')\n{more}")
    return file, mark


READERS: list[Callable[[Path, tuple[str, ...]], object]] = [
    lambda folder, files: check(folder, load_cluster("lab-1gbit"), files),
    lambda folder, files: fit_records([folder], imports=files),
    lambda folder, files: for_report([folder], load_cluster("lab-1gbit"), files),
]


@pytest.mark.parametrize("read", READERS, ids=["check", "calibrate", "report"])
def test_no_records_import_is_run_unasked(read: Callable[..., object], record: Path, tmp_path: Path) -> None:
    file, mark = named(record, tmp_path)
    edited(record / "config.toml", r"\A", f"imports = ['{file}']\n")
    for given in ((), (str(tmp_path / "other.py"),)):
        with pytest.raises(NotAskedFor, match=r"needs the Python file '.*stranger\.py'.* imports .*--import FILE"):
            read(record, given)
    assert not mark.exists()


@pytest.mark.parametrize("read", READERS[1:], ids=["calibrate", "report"])
def test_no_records_job_is_run_unasked(read: Callable[..., object], record: Path, tmp_path: Path) -> None:
    file, mark = named(record, tmp_path)
    edited(record / "config.toml", 'job = "softmax"', f"job = '{file}'")
    with pytest.raises(NotAskedFor, match=r"stranger\.py"):
        read(record, ())
    assert not mark.exists()


def test_what_is_run_is_the_readers_own_file(
    record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "flockstep_job_stranger", raising=False)
    file, mark = named(record, tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    own = elsewhere / file.name
    own.write_text(f"from pathlib import Path\nPath({str(tmp_path / 'own')!r}).write_text('asked for')\n")
    edited(record / "config.toml", r"\A", f"imports = ['{file}']\n")
    assert run(["plan", "softmax", "--check", str(record)]) == 2
    assert "--import FILE" in capsys.readouterr().err
    assert run(["plan", "softmax", "--check", str(record), "--import", str(own)]) == 0
    assert (tmp_path / "own").read_text() == "asked for"
    assert run(["calibrate", "--from", str(record), "--import", str(own)]) == 0
    page = ["--cluster", "lab-1gbit", "--out", str(tmp_path / "report.html")]
    assert run(["report", str(record), *page]) == 2
    assert run(["report", str(record), *page, "--import", str(own)]) == 0
    assert run(["calibrate", "--import", str(own)]) == 2
    assert f"--import {own} is only for --from" in capsys.readouterr().err
    assert not mark.exists()


BROKEN = [
    ("config.toml", "workers = 3", "workers = 2", r"rank of a step in .* must be >= 0 and < 2.*, got 2"),
    ("config.toml", "workers = 3", "workers = 300000000", "workers must be <= 100000, got 300000000"),
    ("events.jsonl", '"rank":1', '"rank":-1', r"rank of a step .* got -1"),
    (
        "events.jsonl",
        '"compute_seconds":[^,]*',
        '"compute_seconds":-1.0',
        r"compute_seconds of a step must be >= 0 .* got -1\.0",
    ),
    ("events.jsonl", '"wait_seconds":[^,]*', '"wait_seconds":1e300', "wait_seconds of a step must be"),
    ("events.jsonl", '"sent_bytes":[0-9]+,"rec', '"sent_bytes":-7,"rec', "sent_bytes of a step must be"),
]


@pytest.mark.parametrize(("name", "old", "new", "rule"), BROKEN, ids=[one[3][:24] for one in BROKEN])
def test_a_broken_record_is_told_in_a_sentence(name: str, old: str, new: str, rule: str, record: Path) -> None:
    edited(record / name, old, new)
    for read in (check, lambda folder: fit_records([folder])):
        with pytest.raises(ConfigurationError, match=rule):
            read(record)


def test_steps_that_take_no_time_are_compared_with_nothing(record: Path) -> None:
    file = record / "events.jsonl"
    file.write_text(re.sub(r'"(compute|wait|comm)_seconds":[^,]*', r'"\1_seconds":0.0', file.read_text()))
    with pytest.raises(ConfigurationError, match="must take more than 0 s"):
        measure(RunFolder(record).read_events(), 3)
