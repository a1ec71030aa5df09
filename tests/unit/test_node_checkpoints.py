"""A node's state in a checkpoint: what the node goes on with."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
from safetensors.numpy import load_file

from flockstep.arrays.schema import Schema
from flockstep.launchers.host_files import HostFiles
from flockstep.messages import Wanted
from flockstep.nodes import Cluster, Worker
from flockstep.optimizers.base import Optimizer
from flockstep.records.checkpoints import shard_file
from flockstep.runtime.checkpoints import ENDED, NodeCheckpoints
from flockstep.runtime.cut import Cut, read_cut
from flockstep.runtime.node_creation import make_server
from flockstep.runtime.node_metrics import NodeMetrics
from flockstep.runtime.runner import OneProcess, Runner
from flockstep.runtime.state import from_arrays, to_arrays
from flockstep.strategies.base import Strategy


def server() -> Runner:
    schema = Schema.of({"w": (3,)}, "float32")
    params = np.zeros(3, np.float32)
    node = make_server(Strategy.parse("ps"), Cluster(2, 1), 0, params, schema, 0, Optimizer.parse("sgd"))
    return Runner(node, OneProcess(), NodeMetrics(node.address, None), time.monotonic)


def checkpoints(runner: Runner) -> NodeCheckpoints:
    connection = SimpleNamespace(runner=runner, leads=True, unsettled=False)
    return NodeCheckpoints(connection)  # type: ignore[arg-type]


def test_a_server_remembers_whose_gradients_it_has_refused() -> None:
    before, after = server(), server()
    before.refused(1, "not finite")
    before.refused(1, "not finite")
    kept = from_arrays(to_arrays(checkpoints(before).state()))
    checkpoints(after).restore(kept, lambda values: None, lambda: after.node.at_boundary())  # type: ignore[misc]
    after.refused(1, "not finite")
    assert after.strikes == {1: 3}


def test_a_state_that_an_earlier_version_wrote_is_read(tmp_path: Path) -> None:
    """The file holds a server's state and what a script added, as objects of three classes that are one today."""
    arrays = load_file(Path(__file__).parent / "data" / "node_before_cut.safetensors")
    after = server()
    for folder in (b"flockstep.runtime.", b"flockstep.drivers."):  # names of equal length
        arrays |= {
            name: np.frombuffer(one.tobytes().replace(b"flockstep.runtime.", folder), np.uint8)
            for name, one in arrays.items()
            if name.endswith("structure")
        }
        cut = read_cut(SimpleNamespace(folder=tmp_path, arrays={-1: arrays}.get), -1)  # type: ignore[arg-type]
        assert isinstance(cut, Cut)
        assert cut.mailbox is not None
        assert cut.params.tolist() == [0, 0, 0]
        assert cut.script["between_steps"] == {"lr": 0.1}
        assert cut.script["extra"]["batch"].tolist() == [0, 1]
        checkpoints(after).restore(cut, lambda values: None, lambda: after.node.at_boundary())  # type: ignore[misc]
        assert after.strikes == {1: 1}


def test_a_node_whose_program_ends_after_it_was_asked_to_count_answers_all_the_same() -> None:
    told: list[dict[str, object]] = []
    runner = server()
    connection = SimpleNamespace(runner=runner, leads=True, unsettled=False, tell=lambda tag, note: told.append(note))
    ours = NodeCheckpoints(connection)  # type: ignore[arg-type]
    ours.hear({"do": "stop", "after": 0})
    ours.hear({"do": "count", "wave": 7})
    ours.close()
    assert [(note["did"], note["wave"], note["state"]) for note in told] == [("count", 7, ENDED)]


class Stopping:
    """A worker that holds a part of a replica: it steps, and while it is stopped it hears what is told later."""

    def __init__(self) -> None:
        self.later = list[dict[str, object]]()
        self.node = Mock(spec=Worker)  # a slotted class, of which only the step is used
        self.node.step = 0
        self.runner = SimpleNamespace(node=self.node, at_rest=False)
        self.checkpoints = NodeCheckpoints(self)  # type: ignore[arg-type]
        self.checkpoints.script = SimpleNamespace(may_stop=True)  # type: ignore[assignment]
        self.stopped_at: list[int] = []

    def attend_stopped(self) -> None:
        self.stopped_at.append(self.node.step)
        self.checkpoints.hear(self.later.pop(0))

    def step(self) -> None:
        self.node.step += 1
        self.checkpoints._at_boundary()


def test_processes_of_a_replica_stop_after_one_step_although_they_are_told_at_different_times() -> None:
    stop: dict[str, object] = {"do": "stop", "after": 0}
    go: dict[str, object] = {"do": "go on", "hold": False}
    early, late = pair = Stopping(), Stopping()

    def agree() -> None:
        newest = max(one.checkpoints._told for one in pair)
        for one in pair:
            one.checkpoints.agree(lambda told: newest)

    agree()
    early.checkpoints.hear(stop)  # behind the point where they agree: neither stops in this step
    for one in pair:
        one.step()
    assert (early.stopped_at, late.stopped_at) == ([], [])
    agree()
    early.later, late.later = [{**stop, "after": 3}], [stop, {**stop, "after": 3}]
    for one in pair:
        one.step()
    assert (early.stopped_at, late.stopped_at) == ([2], [2, 2]), "the late one stops without having been told"
    agree()
    early.later, late.later = [go], [go]
    for one in pair:
        one.step()
    assert (early.stopped_at, late.stopped_at) == ([2, 3], [2, 2, 3])
    early.checkpoints.hear(stop)
    early.checkpoints.hear(go)
    late.checkpoints.hear(stop)  # and `go` is on its way
    agree()
    for one in pair:
        one.step()
    assert (early.stopped_at, late.stopped_at) == ([2, 3], [2, 2, 3]), "neither waits for what the other has heard"


def test_fetching_one_node_s_state_leaves_the_folder_in_which_another_node_of_the_host_is_about_to_write(
    tmp_path: Path,
) -> None:
    """The agent removes a fetched file and its folder."""
    told: list[dict[str, object]] = []
    nodes = []
    for address in (-1, -2):
        connection = SimpleNamespace(runner=server(), leads=True, unsettled=False, directory=tmp_path, address=address)
        connection.tell, connection.now = lambda tag, note: told.append(note), time.monotonic
        node = NodeCheckpoints(connection)  # type: ignore[arg-type]
        node.script = SimpleNamespace(at_boundary=lambda: None)  # type: ignore[assignment]  # which completes the copy
        node.hear({"do": "stop", "after": 0})
        node.hear({"do": "copy", "folder": "000001", "wait": 0})
        nodes.append(node)
    nodes[0].complete({})
    nodes[0].report(wait=True)
    (file,) = tmp_path.rglob(shard_file(-1))
    agent = HostFiles(tmp_path)
    agent.fetch(str(file.relative_to(tmp_path)))
    assert [part.why for part, _ in agent.parts()] == [""]
    nodes[1].complete({})
    nodes[1].report(wait=True)
    assert [note["did"] for note in told] == ["copy", "copy", "write", "write"]


def test_a_pattern_of_messages_names_no_array_unless_told() -> None:
    assert Wanted("push").place is None
