"""The messages that a supervisor takes from its nodes, and those that it sends them at the end of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flockstep.errors import PeerLost, ProtocolError, RunError
from flockstep.launchers.checkpoints import Checkpointer
from flockstep.launchers.peers import RunPeer, RunPeers
from flockstep.launchers.supervisor import Supervisor
from flockstep.messages import Message
from flockstep.nodes import Cluster
from flockstep.runtime.node_metrics import fingerprint
from flockstep.strategies.base import Strategy
from support.jobs import run_of, supervised


class Link:
    """A link that stores the messages by which a node is dismissed."""

    def dismiss(self, result: object, buffers: object) -> None:
        self.result, self.buffers = result, buffers


def supervisor_of(
    workers: int, folder: Path, checkpoints: Checkpointer | None = None, min_workers: int | None = None
) -> Supervisor:
    config = replace(run_of(workers), min_workers=min_workers)
    return supervised(config, folder, lambda node_spec: None, checkpoints=checkpoints)


def test_only_who_holds_another_model_is_sent_the_result(tmp_path: Path) -> None:
    supervisor = supervised(run_of(2), tmp_path, lambda node_spec: None, script=True)
    links: dict[int, Any] = {address: Link() for address in (0, 1, -1)}
    result = np.arange(5.0)
    for address, link in links.items():
        supervisor.peers.setdefault(address, RunPeer()).link = link
    supervisor.collection.hashes = {0: fingerprint(result), 1: fingerprint(result + 1), -1: fingerprint(result[:2])}
    supervisor.collection.outcome.newest_model = lambda policy=None: (None, result)  # type: ignore[method-assign]
    supervisor.collection.dismiss()
    assert [links[address].result is not None for address in (0, 1, -1)] == [False, True, False]
    assert links[0].result is None


def test_a_worker_puts_no_other_node_in_quarantine(tmp_path: Path) -> None:
    supervisor = supervisor_of(2, tmp_path)
    for by, node in ((0, 1), (1, -1), (-1, -2)):
        with pytest.raises(ProtocolError, match="in quarantine, but only a server or the worker itself may do that"):
            supervisor._handle(Message(by, "quarantine", note={"address": node, "reason": "bad"}))
    assert [one.condemned for one in supervisor.peers.values()] == ["", ""]
    for by, node in ((-1, 1), (0, 0)):
        supervisor._handle(Message(by, "quarantine", note={"address": node, "reason": "bad"}))
    assert [one.condemned for one in supervisor.peers.values()] == ["bad", "bad"]


class Process:
    """A process that a test lets end."""

    code: int | None = None

    def exit_code(self) -> int | None:
        return self.code


def failing(folder: Path) -> tuple[Supervisor, list[Process]]:
    """The supervisor of two replicas of two processes, of which one has reported an error of PyTorch."""
    supervisor = supervised(run_of(4), folder, lambda node_spec: None, script=True)
    processes = [Process() for _ in range(4)]
    supervisor.outcome.sizes = (1, 1)
    for rank, process in enumerate(processes):
        supervisor.peers[rank].child = process  # type: ignore[assignment]
    supervisor._fail(3, "RunError", "worker 3 raised RuntimeError: a connection was closed", "")
    return supervisor, processes


def test_a_process_that_fails_because_another_of_its_replica_dies_does_not_end_the_run(tmp_path: Path) -> None:
    """Its report may come before the death shows."""
    supervisor, processes = failing(tmp_path)
    processes[2].code = -9
    supervisor._look_after_processes()
    assert supervisor._failing == []


def test_the_error_that_has_failed_another_process_of_the_replica_is_told(tmp_path: Path) -> None:
    supervisor, processes = failing(tmp_path)
    processes[3].code = 1
    with pytest.raises(RunError, match="worker 3 raised"):
        supervisor._fail(2, "RunError", "worker 2 raised RuntimeError: a connection was closed", "")


def test_an_error_while_the_others_of_the_replica_live_ends_the_run_after_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flockstep.launchers.supervisor.SETTLING", 0.0)
    with pytest.raises(RunError, match="worker 3 raised"):
        failing(tmp_path)


def test_the_loss_of_every_worker_is_a_loss_of_peers(tmp_path: Path) -> None:
    """Its error then names `flockstep resume`, as that of a single lost worker does."""
    supervisor = supervisor_of(1, tmp_path)
    supervisor.peers[0].gone = True
    with pytest.raises(PeerLost, match="every worker was lost"):
        supervisor._finished()


def test_who_asks_to_leave_and_cannot_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints").write_text("a file in place of the folder")
    checkpoints = Checkpointer(tmp_path)
    supervisor = supervisor_of(3, tmp_path, checkpoints, min_workers=1)
    supervisor.peers.went = 0.0
    checkpoints.begin(RunPeers(0, 5.0), Strategy.parse("all_reduce"), Cluster(0, 0))
    supervisor._handle(Message(1, "leave"))
    supervisor._changes.look()
    said = "worker 1 did not leave after SIGTERM: "
    assert [text.startswith(said) for text in supervisor.outcome.warnings] == [True]
    assert len(supervisor.outcome.warnings[0]) > len(said), "the reason"
    assert said in capfd.readouterr().err
    assert supervisor.outcome.change is None
    supervisor._changes.look()
    assert not checkpoints.busy, "the next attempt is not due"
    (tmp_path / "checkpoints").unlink()
    supervisor._changes._leave_again = 0.0
    supervisor._changes.look()
    assert checkpoints.busy, "the worker tries to leave again, because the process was asked only once"


def test_a_checkpoint_that_is_due_does_not_let_workers_leave_that_go_on(tmp_path: Path) -> None:
    """A worker leaves at a checkpoint after which the nodes stay stopped."""
    checkpoints = Checkpointer(tmp_path)
    checkpoints.begin(RunPeers(0, 5.0), Strategy.parse("all_reduce"), Cluster(0, 0))
    checkpoints.why_not = ""
    assert checkpoints.is_cut is False
    checkpoints.cut()
    assert checkpoints.is_cut is None
