"""A run's folder has one owner, and what a run computed in it is not lost unasked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flockstep.errors import ConfigurationError, RunError
from flockstep.launchers.peers import Outcome
from flockstep.launchers.run import conclude
from flockstep.records import EventWriter, RunConfig, RunFolder, summarize
from flockstep.records.events import Event, LostEvent, StepEvent
from flockstep.records.summary import Status

CONFIG = RunConfig(kind="train", job="digits", strategy="bsp", workers=4, seed=1)
EVENTS: list[Event] = [StepEvent(0.5, 0, 1, 0.5, 0.1, 0.2, 0.3, 10, 20, 1, 2)]


def made(folder: RunFolder, config: RunConfig = CONFIG, overwrite: bool = False) -> None:
    with folder.created(config, overwrite):
        pass


@pytest.mark.parametrize("other", [CONFIG, replace(CONFIG, seed=7)])
@pytest.mark.parametrize(
    ("status", "word"),
    [("finished", "a finished"), ("interrupted", "an interrupted"), ("failed", "a failed"), (None, "an interrupted")],
)
def test_what_a_run_computed_is_replaced_on_request_only(
    status: Status | None, word: str, other: RunConfig, tmp_path: Path
) -> None:
    """Also where the configuration is the same: what a run computed is nobody's to lose without being asked."""
    folder = RunFolder(tmp_path / "run")
    made(folder)
    with EventWriter(folder.events_file) as events:
        for event in EVENTS:
            events.write(event)
    if status is not None:
        folder.write_summary(summarize(CONFIG, EVENTS, status, "why"))
    sentence = f"holds {word} run; choose another folder with --out, or replace it with --overwrite"
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        made(folder, other)
    assert folder.read_config() == CONFIG
    assert folder.read_events() == EVENTS
    made(folder, other, overwrite=True)
    assert folder.read_config() == other
    assert [path.name for path in folder.path.iterdir()] == ["config.toml"]


def test_a_run_that_failed_before_its_first_step_is_replaced(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    made(folder)
    folder.write_summary(summarize(CONFIG, [], "failed", "why"))
    assert folder.unfinished
    made(folder, replace(CONFIG, seed=7))
    assert folder.read_config().seed == 7
    assert not folder.summary_file.exists()


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.created(CONFIG):
        with pytest.raises(ConfigurationError, match=f"in use: process {os.getpid()} writes the record of a run there"):
            made(folder, overwrite=True)
        folder.check_whole()
    assert [path.name for path in folder.path.iterdir()] == ["config.toml"]
    made(folder)


def test_the_owner_is_another_process_until_the_system_ends_it(tmp_path: Path) -> None:
    code = "import sys; from flockstep.records.owner import owned\n"
    code += "with owned(sys.argv[1]): print(flush=True), sys.stdin.read()"
    command = [sys.executable, "-c", code.replace("sys.argv[1]", f"__import__('pathlib').Path({str(tmp_path)!r})")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"\n"
        with pytest.raises(ConfigurationError, match=f"in use: process {other.pid} writes"):
            made(RunFolder(tmp_path))
        other.kill()
    assert (tmp_path / ".owner").exists()
    made(RunFolder(tmp_path))


def test_a_record_that_lost_a_file_or_its_folder_is_told(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.created(CONFIG):
        EventWriter(folder.node_events_file(0)).close()
        folder.check_whole([0])
        folder.node_events_file(0).unlink()
        with pytest.raises(RunError, match=r"worker-0\.jsonl was removed during its run"):
            folder.check_whole([0])
        folder.config_file.unlink()
        with pytest.raises(RunError, match=r"config\.toml was removed"):
            folder.check_whole()
        shutil.rmtree(folder.path)
        folder.write_config(CONFIG)  # a folder in its place is another one
        with pytest.raises(RunError, match="was removed or replaced during its run"):
            folder.check_whole()


def test_what_a_lost_rank_had_written_belongs_to_the_record(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.created(CONFIG):
        outcome = Outcome(2, lost={0: LostEvent(1.0, 0, "killed")}, nodes={0})
        with pytest.raises(RunError, match=r"worker-0\.jsonl was removed during its run"):
            conclude(folder, CONFIG, outcome)
