"""The calls of `flockstep.checkpoint` and `flockstep.resumed`: what they keep, and what they refuse."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

import flockstep
from flockstep import __version__
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError
from flockstep.experiments.single import resume
from flockstep.records import checkpoints as disk
from flockstep.records.config import RunConfig
from flockstep.records.folder import RunFolder
from flockstep.runtime.checkpoints import ScriptCheckpoints
from flockstep.runtime.setup import JOB_FILE, digest
from flockstep.runtime.state import from_arrays

EXTRA = {"epoch": 1, "batch": 4, "rates": {"last": [0.1, np.float32(0.2)]}}


class Keeper:
    """A framework whose only state is the number of calls that restored it."""

    refusal = ""
    newest = None
    restored = 0
    streams = True
    """Whether the random streams are to be restored, too."""

    def at_boundary(self) -> Any:
        return None

    def between_steps(self) -> Any:
        return "between"

    def restore_at_boundary(self, kept: Any) -> None:
        raise AssertionError

    def restore_between_steps(self, kept: Any, random: bool) -> None:
        assert (kept, random) == ("between", self.streams)
        self.restored += 1


class Checkpoints:
    """Stands for the node's part: collects what the script adds."""

    script: Any = None
    offers = 0

    def __init__(self) -> None:
        self.copied = False
        self.added: list[dict[str, FlatArray]] = []
        self.dropped: list[str] = []

    def offer(self) -> None:
        self.offers += 1

    def complete(self, more: dict[str, FlatArray], deals: bool) -> None:
        self.copied = False
        self.added.append(more)

    def drop(self, why: str) -> None:
        self.copied = False
        self.dropped.append(why)


def script(
    extra: Any = None, mailbox: object = "messages", joins: bool = False
) -> tuple[ScriptCheckpoints, Checkpoints, Keeper]:
    """A script at its start, or one that goes on from a checkpoint with `extra`; a checkpoint that was made for another
    number of workers has no mailbox.
    """
    node, keeper = Checkpoints(), Keeper()
    state = {"between_steps": "between", "extra": extra}
    kept: Any = None if extra is None else SimpleNamespace(script=state, mailbox=mailbox)
    if kept is not None:
        kept.joins, keeper.streams = joins, not joins
    return ScriptCheckpoints(node, keeper, kept), node, keeper  # type: ignore[arg-type]


def begun(extra: Any = None) -> tuple[ScriptCheckpoints, Checkpoints, Keeper]:
    calls, node, keeper = script(extra)
    calls.resumed()
    return calls, node, keeper


def test_the_next_call_completes_a_copy_with_the_values_of_its_place() -> None:
    calls, node, _ = begun()
    asked = []

    def extra() -> dict[str, int]:
        asked.append(len(asked))
        return {"batch": len(asked)}

    for step in range(1, 5):
        calls.checkpoint(extra)
        calls.before_step()
        node.copied = step == 2
    assert node.offers == 1
    assert len(asked) == 2, "a function is called once to begin, and for a checkpoint"
    assert [from_arrays(one) for one in node.added] == [{"between_steps": "between", "extra": {"batch": 2}}]


def test_a_resumed_script_gets_its_values_and_must_restore_them() -> None:
    calls, node, keeper = script(EXTRA)
    assert calls.resumed() == EXTRA
    assert (node.offers, keeper.restored) == (0, 0)
    calls.checkpoint(EXTRA)
    assert (node.offers, keeper.restored) == (1, 1)
    calls.before_step()

    for now, said in [
        (
            {**EXTRA, "batch": 0},
            r"extra\['batch'\] .* got 0 in place of 4; restore extra\['batch'\] from flockstep.resumed",
        ),
        ({"epoch": 1, "batch": 4}, r"extra\['rates'\] .* got nothing in place of"),
        ({**EXTRA, "more": 1}, r"extra\['more'\] .* got 1 in place of nothing"),
        ({**EXTRA, "epoch": 1.0}, r"extra\['epoch'\] .* got 1.0 in place of 1"),
    ]:
        calls, node, keeper = begun(EXTRA)
        with pytest.raises(ConfigurationError, match=said):
            calls.checkpoint(now)
        assert (node.offers, keeper.restored) == (0, 0)


@pytest.mark.parametrize("joins", [False, True])
def test_another_number_of_workers_may_count_in_another_way_but_restores_every_name(joins: bool) -> None:
    """A worker that joins keeps its own random streams."""
    for now, said in [
        ({"epoch": 2, "batch": 0}, r"extra\['rates'\] .* got nothing in place of"),
        ({**EXTRA, "more": 1}, r"extra\['more'\] .* got 1 in place of nothing"),
    ]:
        calls, node, keeper = script(EXTRA, None, joins)
        calls.resumed()
        with pytest.raises(ConfigurationError, match=said):
            calls.checkpoint(now)
        assert (node.offers, keeper.restored) == (0, 0)
    calls.checkpoint({**EXTRA, "epoch": 2, "batch": 0})
    assert (node.offers, keeper.restored) == (1, 1)


def test_a_change_of_the_returned_values_changes_no_comparison() -> None:
    calls, _, _ = script({"order": [1, 2]})
    values = calls.resumed()
    assert values is not None
    values["order"].append(3)
    with pytest.raises(ConfigurationError, match=r"^extra\['order'\]\[2\] .* got 3 in place of nothing"):
        calls.checkpoint(values)


def test_the_first_difference_of_a_large_value_is_named() -> None:
    """Values whose first 60 characters are equal, such as the state of a scheduler."""
    scheduler = {
        "T_max": 6400,
        "eta_min": 0.0,
        "base_lrs": [0.1],
        "verbose": False,
        "last_epoch": 640,
        "_step_count": 641,
    }
    for changes, said in [
        ({"last_epoch": 0}, r"extra\['it'\]\['last_epoch'\] .* got 0 in place of 640; restore extra\['it'\] from"),
        ({"base_lrs": [0.1, 0.2]}, r"\['base_lrs'\]\[1\] .* got 0.2 in place of nothing"),
        ({"base_lrs": (0.1,)}, r"\['base_lrs'\] .* got \(0.1,\) in place of \[0.1\]"),
        ({"more": 1}, r"\['more'\] .* got 1 in place of nothing"),
    ]:
        calls, _, _ = begun({"it": scheduler})
        with pytest.raises(ConfigurationError, match=said):
            calls.checkpoint({"it": scheduler | changes})
    for now, kept, said in [
        ("a" * 100 + "b", "a" * 100 + "c", r"got \.\.\.a+b' in place of \.\.\.a+c'; restore"),
        (np.zeros(2000), np.eye(1, 2000, 900)[0], r"got other elements in place of array\(\[0\., 0\., "),
    ]:
        calls, _, _ = begun({"it": kept})
        with pytest.raises(ConfigurationError, match=said):
            calls.checkpoint({"it": now})


def test_what_would_lose_state_is_refused() -> None:
    calls, _, _ = script()
    with pytest.raises(ConfigurationError, match=r"call flockstep.resumed\(\) before the loop"):
        calls.checkpoint({})
    calls, _, _ = begun()
    with pytest.raises(ConfigurationError, match=r"extra must be a dict of names and values, .* got list"):
        calls.checkpoint([])  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"extra\['rate'\]"):
        calls.checkpoint({"rate": lambda: 1})
    calls.before_step()
    calls.before_step()  # of a script that takes no checkpoints
    calls.checkpoint({})
    calls.before_step()
    with pytest.raises(ConfigurationError, match="must be called once for every step, got two steps"):
        calls.before_step()
    for call in ("before_step", "before_restart"):
        calls, _, _ = begun(EXTRA)
        with pytest.raises(ConfigurationError, match="in a resumed run the script must call"):
            getattr(calls, call)()
    calls, _, keeper = begun()
    keeper.refusal = "no place to stop"
    with pytest.raises(ConfigurationError, match="no place to stop"):
        calls.checkpoint({})


def test_a_copy_that_cannot_be_completed_is_dropped_with_the_reason() -> None:
    calls, node, _ = begun()
    calls.checkpoint({"rate": 1})
    node.copied = True
    calls.checkpoint({"rate": lambda: 1})
    assert node.added == []
    assert "rate" in node.dropped[0]
    node.copied = True
    calls.before_restart()
    assert node.dropped[1:] == ["the script has loaded another model since its last step"]


def test_nothing_happens_in_a_script_that_runs_alone() -> None:
    assert flockstep.resumed() is None
    flockstep.checkpoint({"anything": object()})


def test_a_script_that_cannot_be_resumed_is_refused_in_one_sentence(tmp_path: Path) -> None:
    file, record = tmp_path / "script.py", RunFolder(tmp_path / "run")
    file.write_text("import flockstep\n")
    names = {"kind": "launch", "job": str(file), "strategy": "as the script says"}
    config = RunConfig(**names, workers=2, versions={JOB_FILE: digest(file)})  # type: ignore[arg-type]
    with record.created(config, False):
        pass

    def refused(why: str) -> None:
        with pytest.raises(ConfigurationError, match=why):
            resume(record.path)

    refused("holds no complete checkpoint; repeat the run, with --checkpoint-every for checkpoints")
    arrays = {"w": np.zeros(3, np.float32)}
    folder = disk.new_folder(record.path)
    shards = tuple(disk.write_shard(folder, rank, 20, arrays) for rank in range(2))
    manifest = disk.Manifest(disk.FORMAT, __version__, "all_reduce", 2, config.digest, 1.0, shards)
    disk.write_manifest(folder, msgspec.structs.replace(manifest, config="0"))
    refused("config.toml is not the configuration with which")
    disk.write_manifest(folder, manifest)
    file.write_text("import flockstep  # changed\n")
    refused("script.py has changed since the run began")
    file.unlink()
    refused("the script must be a Python file, and .*script.py does not exist; give the path of a .py file")
    record.write_config(dataclasses.replace(config, versions={}))
    refused("did not start from a script, so it cannot be resumed")
