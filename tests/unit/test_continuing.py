"""Which run a command with --resume continues."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flockstep.errors import ConfigurationError, RunError
from flockstep.launchers.continuing import Continuation, continuation, keep_configs
from flockstep.records.checkpoints import new_folder
from flockstep.records.config import RunConfig
from flockstep.records.folder import RunFolder

HELD = RunConfig(kind="train", job="softmax", strategy="all_reduce", workers=2, transport="tcp(host='10.0.0.1')")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with pytest.raises(RunError, match="stops"), RunFolder(tmp_path / "run").created(HELD, False):
        raise RunError("the run stops before its first checkpoint")
    return tmp_path / "run"


@pytest.mark.parametrize("transport", [None, "tcp", "tcp(host='10.0.0.2')"])
def test_the_hosts_of_a_run_may_have_other_addresses(transport: str | None, folder: Path) -> None:
    assert continuation(replace(HELD, transport=transport), folder) == Continuation(overwrites=True)


@pytest.mark.parametrize("transport", ["ipc", "tcp(encrypt=false)"])
def test_a_run_is_not_continued_with_another_transport_than_the_command_names(transport: str, folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds another run: its transport is tcp"):
        continuation(replace(HELD, transport=transport), folder)


def test_the_run_of_a_script_is_continued_whose_workers_have_changed(tmp_path: Path) -> None:
    """The record names the script's strategy, and the configurations beside the checkpoints do not."""
    command = RunConfig(kind="launch", job="train.py", strategy="as the script says", workers=2, max_workers=4)
    now = replace(command, workers=3, strategy="all_reduce")
    record = RunFolder(tmp_path / "run")
    with record.created(now, False):
        new_folder(record.path)
        keep_configs(record, command)
    assert continuation(command, tmp_path / "run") == Continuation(overwrites=True)
    with pytest.raises(ConfigurationError, match="holds another run: its workers is 3, and this command's is 4"):
        continuation(replace(command, workers=4), tmp_path / "run")
