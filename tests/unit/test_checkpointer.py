"""When all nodes have stopped and nothing is on its way: the supervisor's side of a checkpoint, without processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flockstep.errors import RunError
from flockstep.launchers import checkpoints
from flockstep.launchers.checkpoints import Checkpointer
from flockstep.launchers.peers import RunPeer, RunPeers
from flockstep.messages import Address
from flockstep.records import checkpoints as disk
from flockstep.records.config import CheckpointInterval
from flockstep.runtime.checkpoints import ENDED, RUNNING, STOPPED
from flockstep.strategies.base import Strategy


class Link:
    """What one node is told."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def tell(self, tag: str, note: dict[str, Any]) -> None:
        assert tag == "checkpoint"
        self.told.append(note)


def peers_with(links: dict[Address, Link]) -> RunPeers:
    """Two workers and a server that have joined."""
    peers = RunPeers(2, 5.0)
    for address, link in links.items():
        peers.setdefault(address, RunPeer()).link = link  # type: ignore[assignment]
    return peers


class Run:
    """Two workers and a server, whose answers a test gives."""

    def __init__(self, record: Path, strategy: str = "asgd"):
        self.links = {0: Link(), 1: Link(), -1: Link()}
        self.checkpointer = Checkpointer(record, CheckpointInterval(steps=10), 2)
        self.peers = peers_with(self.links)
        self.checkpointer.begin(self.peers, Strategy.parse(strategy), Strategy.parse("asgd").cluster(2))

    def begin(self) -> None:
        self.checkpointer.look(10)

    def answer(self, **nodes: tuple[int, int, int, int]) -> None:
        """A wave: (state, step, sent, received) of the nodes a, b (workers) and s (the server)."""
        for name, (state, step, sent, received) in nodes.items():
            address = {"a": 0, "b": 1, "s": -1}[name]
            wave = max(note.get("wave", 0) for note in self.links[address].told)
            counts = {"sent": sent, "received": received}
            self.checkpointer.hear(address, {"did": "count", "wave": wave, "state": state, "step": step, **counts})

    def last(self, address: int) -> list[dict[str, Any]]:
        """What a node was told since the last call."""
        told, self.links[address].told = self.links[address].told, self.links[address].told[-1:]
        return told

    @property
    def copies(self) -> bool:
        return any(note["do"] == "copy" for link in self.links.values() for note in link.told)


ALL = {"a": (STOPPED, 12, 12, 11), "b": (STOPPED, 10, 10, 10), "s": (STOPPED, 0, 21, 22)}


def test_a_checkpoint_is_begun_when_the_slowest_worker_has_made_the_steps(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.checkpointer.look(9)
    assert not run.checkpointer.busy
    run.begin()
    assert [note["do"] for note in run.links[0].told] == ["stop", "count"]


def test_states_are_copied_after_two_equal_waves_with_as_many_messages_received_as_sent(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.begin()
    run.answer(**ALL)
    assert not run.copies, "one wave is not enough: a message may have overtaken it"
    run.answer(**ALL)
    assert run.copies


@pytest.mark.parametrize(
    "change",
    [{"s": (STOPPED, 0, 22, 22)}, {"a": (STOPPED, 12, 13, 11)}, {"s": (RUNNING, 0, 21, 22)}],
    ids=["reply on its way", "push on its way", "not all stopped"],
)
def test_states_are_not_copied_while_something_is_missing(
    change: dict[str, tuple[int, int, int, int]], tmp_path: Path
) -> None:
    run = Run(tmp_path)
    run.begin()
    for _ in range(3):
        run.answer(**{**ALL, **change})
    assert not run.copies
    run.answer(**ALL)
    assert not run.copies, "the counts have just changed"
    run.answer(**ALL)
    assert run.copies


def test_the_worker_that_others_wait_for_goes_on_by_one_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.begin()
    waits = {**ALL, "s": (RUNNING, 0, 21, 22)}
    run.answer(**waits)
    run.last(1)
    run.answer(**waits)
    assert {"do": "stop", "after": 11} in run.last(1)
    assert {"do": "stop", "after": 13} not in run.last(0)


def test_workers_that_hold_a_replica_together_go_on_together(tmp_path: Path) -> None:
    """One of them has not stopped yet, and would stop a step before the other, which then waits for it."""
    run = Run(tmp_path)
    run.checkpointer.begin(run.peers, Strategy.parse("asgd"), Strategy.parse("asgd").cluster(2), parts=2)
    run.begin()
    waits = {**ALL, "b": (STOPPED, 10, 10, 10), "a": (RUNNING, 10, 12, 11), "s": (RUNNING, 0, 21, 22)}
    for _ in range(2):
        run.last(0)
        run.answer(**waits)
    assert {"do": "stop", "after": 11} in run.last(0)
    assert {"do": "stop", "after": 11} in run.last(1)


def test_nothing_is_released_while_no_worker_has_stopped(tmp_path: Path) -> None:
    """Processes of a replica wait for messages of each other that are not counted."""
    run = Run(tmp_path)
    run.begin()
    for _ in range(3):
        run.answer(a=(RUNNING, 10, 0, 0), b=(RUNNING, 10, 0, 0), s=(STOPPED, 0, 0, 0))
    assert run.checkpointer.busy
    assert [note["do"] for note in run.last(0)] == ["stop", "count", "count", "count", "count"]


def test_a_run_that_never_stops_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoints, "MOST_RELEASES", 3)
    run = Run(tmp_path)
    run.begin()
    for _ in range(6):
        run.answer(**{**ALL, "s": (RUNNING, 0, 21, 22)})
    assert not run.checkpointer.busy
    assert run.checkpointer.notes == [
        "no checkpoints are taken, because server 0 did not reach a point where a program can stop"
    ]
    assert run.last(0)[-1] == {"do": "go on", "hold": 0}
    assert run.checkpointer.why_not == "server 0 did not reach a point where a program can stop"
    capsys.readouterr()


@pytest.mark.parametrize("how", ["ended", "lost"])
def test_no_checkpoint_is_taken_once_a_worker_has_ended_or_is_lost(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, "asgd" if how == "ended" else "ensemble")  # which has no rule for fewer workers
    run.begin()
    if how == "ended":
        run.answer(**{**ALL, "a": (ENDED, 12, 12, 11)})
    else:
        run.checkpointer.lose(1, 10)
        assert run.checkpointer.notes == ["no more checkpoints are taken, because worker 1 was lost"]
    assert not run.checkpointer.busy
    assert run.checkpointer.why_not == ("a worker had taken its last step" if how == "ended" else "worker 1 was lost")
    assert disk.folders(tmp_path) == []
    run.checkpointer.look(50)
    assert not run.checkpointer.busy
    capsys.readouterr()


def test_after_a_loss_the_checkpoint_is_of_the_nodes_that_live(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.begin()
    lost, run.peers[1].link = run.links[1], None
    run.checkpointer.lose(1, 10)
    assert run.checkpointer.busy, "the checkpoint in progress begins again"
    for _ in range(2):
        run.answer(a=(STOPPED, 12, 12, 11), s=(STOPPED, 0, 11, 12))
    (folder,) = disk.folders(tmp_path)
    for address, step in ((0, 12), (-1, 0)):
        run.checkpointer.hear(address, {"did": "copy", "seconds": 1.0, "step": step, "folder": folder.name})
        shard = disk.write_shard(folder, address, step, {"x": np.zeros(1)})
        note = {"step": step, "nbytes": shard.nbytes, "sha256": shard.sha256}
        run.checkpointer.hear(address, {"did": "write", "folder": folder.name, "deals": 0, **note})
    manifest = disk.newest(tmp_path).manifest
    assert (manifest.workers, manifest.steps, manifest.lost) == (2, {0: 12}, {1: 10})
    assert "copy" not in [note["do"] for note in lost.told]
    run.checkpointer.look(22)
    assert run.checkpointer.busy, "the next one is due"


def test_scripts_that_have_not_called_checkpoint_are_named_where_the_run_itself_has_not_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended(offers: tuple[int, ...], failed: bool) -> str:
        checkpointer = Checkpointer(tmp_path, CheckpointInterval(steps=10), scripts=True)
        strategy = Strategy.parse("asgd")
        checkpointer.begin(peers_with(dict.fromkeys((1, 0, -1), Link())), strategy, strategy.cluster(2))
        for rank in offers:
            checkpointer.hear(rank, {"did": "offer"})
        checkpointer.end(failed)
        return capsys.readouterr().err

    said = "flockstep: no checkpoint was taken, because the {} not called flockstep.checkpoint\n"
    assert ended((), False) == said.format("scripts of workers 0 and 1 have")
    assert ended((0,), False) == said.format("script of worker 1 has")
    assert ended((0, 1), False) == ended((), True) == ""


def test_a_run_ends_where_its_first_checkpoint_is_due_and_a_script_takes_none(tmp_path: Path) -> None:
    """Not before its second step: a script may call `flockstep.checkpoint` at the end of the body of its loop."""
    strategy, peers = Strategy.parse("asgd"), peers_with(dict.fromkeys((1, 0, -1), Link()))

    def begun(every: CheckpointInterval) -> Checkpointer:
        checkpointer = Checkpointer(tmp_path, every, scripts=True)
        checkpointer.begin(peers, strategy, strategy.cluster(2))
        checkpointer.hear(0, {"did": "offer"})
        return checkpointer

    checkpointer = begun(CheckpointInterval(steps=10))
    checkpointer.look(9)
    said = (
        "at step 10, because the script of worker 1 has not called flockstep.checkpoint; call it at the top of the loop"
    )
    with pytest.raises(RunError, match=said):
        checkpointer.look(10)
    checkpointer = begun(CheckpointInterval(seconds=1e-9))
    checkpointer.look(1)
    with pytest.raises(RunError, match="at step 2, because"):
        checkpointer.look(2)
    checkpointer.hear(1, {"did": "offer"})
    checkpointer.look(11)
    assert checkpointer.busy


@pytest.mark.parametrize("fails", [False, True])
def test_the_manifest_is_written_once_all_nodes_have_written(
    fails: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    run.begin()
    run.answer(**ALL)
    run.answer(**ALL)
    (folder,) = disk.folders(tmp_path)
    for address in run.links:
        assert run.last(address)[-1]["do"] == "copy"
        run.checkpointer.hear(address, {"did": "copy", "seconds": 1.0 + address, "step": 10, "folder": folder.name})
    assert run.last(0)[-1] == {"do": "go on", "hold": 0}, "nodes go on while their states are written"
    for address, step in ((0, 12), (1, 10)):
        shard = disk.write_shard(folder, address, step, {"x": np.zeros(1)})
        note = {"step": step, "nbytes": shard.nbytes, "sha256": shard.sha256}
        run.checkpointer.hear(address, {"did": "write", "folder": folder.name, "deals": 0, **note})
    assert not (folder / disk.MANIFEST).exists()
    shard = disk.write_shard(folder, -1, 0, {"x": np.zeros(1)})
    last = {
        "did": "write",
        "folder": folder.name,
        "deals": 0,
        "step": 0,
        "nbytes": shard.nbytes,
        "sha256": shard.sha256,
    }
    failure = {"did": "fail", "why": "Input/output error", "folder": folder.name}
    run.checkpointer.hear(-1, failure if fails else last)
    assert not run.checkpointer.busy
    if fails:
        assert disk.folders(tmp_path) == []
        text = "no checkpoint was written, and the previous checkpoint is kept: Input/output error"
        assert run.checkpointer.notes == [text]
        assert run.checkpointer.why_not == "Input/output error"
        assert text in capsys.readouterr().err
    else:
        manifest = disk.newest(tmp_path).manifest
        assert manifest.steps == {0: 12, 1: 10}
        assert manifest.seconds == 2.0


def test_a_signal_while_a_checkpoint_is_being_written_takes_another_one(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.begin()
    run.answer(**ALL)
    run.answer(**ALL)
    (folder,) = disk.folders(tmp_path)
    for address in run.links:
        run.checkpointer.hear(address, {"did": "copy", "seconds": 1.0, "step": 10, "folder": folder.name})
    assert run.checkpointer.stop()
    for address in run.links:
        shard = disk.write_shard(folder, address, 10, {"x": np.zeros(1)})
        note = {"step": 10, "nbytes": shard.nbytes, "sha256": shard.sha256}
        run.checkpointer.hear(address, {"did": "write", "folder": folder.name, "deals": 0, **note})
    assert disk.newest(tmp_path).folder == folder
    assert run.checkpointer.busy, "the nodes have gone on since their states were copied"
    assert {"do": "stop", "after": 0} in run.last(0)[-2:]


def test_what_was_written_for_a_checkpoint_that_was_given_up_is_not_used(tmp_path: Path) -> None:
    """A server is replaced by its backup while states are written: the next checkpoint has another folder."""
    run = Run(tmp_path)
    names = []
    for number in range(2):
        run.begin() if number == 0 else run.checkpointer.stop()
        run.answer(**ALL)
        run.answer(**ALL)
        (folder,) = disk.folders(tmp_path)
        names.append(folder.name)
        for address in run.links:
            run.checkpointer.hear(address, {"did": "copy", "seconds": 1.0, "step": 10, "folder": folder.name})
        if number == 0:
            run.checkpointer.interrupt("server 0 was lost")
            assert disk.folders(tmp_path) == []
    assert names[0] != names[1]
    for address in run.links:
        late = {"did": "write", "folder": names[0], "step": 10, "nbytes": 1, "sha256": "0"}
        run.checkpointer.hear(address, late)
    assert run.checkpointer.busy
    assert not (folder / disk.MANIFEST).exists()
