"""Parameters that nodes hand in: part by part into a file, wherever one is taken, and never much of them in memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from flockstep.arrays.schema import FlatArray, Schema
from flockstep.errors import ProtocolError, RunError
from flockstep.launchers.peers import ProcessLink
from flockstep.links.control import Control
from flockstep.messages import Fields
from flockstep.nodes import Cluster, Worker
from flockstep.records.snapshots import SNAPSHOTS, Snapshot, SnapshotWriter
from flockstep.runtime.member import WINDOW, Hello, Member, NodeSpec
from flockstep.runtime.reports import SnapshotSender
from support.disks import small_disk

PARAMS = np.arange(100_000, dtype=np.float32)
BUFFERS = np.arange(7, dtype=np.uint8)
NOTE: Fields = {
    "tick": 3.0,
    "seconds": 1.5,
    "step": 7,
    "sent_bytes": 9,
    "size": 100_000,
    "dtype": "float32",
    "buffers": 7,
}


def parts(size: int = 30_000) -> list[FlatArray]:
    data = np.concatenate([PARAMS.view(np.uint8), BUFFERS])
    return [data[start : start + size] for start in range(0, len(data), size)]


def written(folder: Path) -> Snapshot:
    arriving = SnapshotWriter(folder, 0, NOTE, PARAMS.nbytes)
    *before, last = [arriving.add(part) for part in parts()]
    assert before == [None] * len(before)
    assert last is not None
    return last


def check(item: Snapshot, folder: Path) -> None:
    assert (item.tick, item.seconds, item.step, item.sent_bytes, Path(item.path).parent) == (3.0, 1.5, 7, 9, folder)
    assert np.array_equal(item.read(), PARAMS)
    assert np.array_equal(item.read_buffers(), BUFFERS)
    assert [file.name for file in folder.iterdir() if file.name[0] != "."] == ["worker-0.3"]


def test_parts_become_a_file(tmp_path: Path) -> None:
    check(written(tmp_path / SNAPSHOTS), tmp_path / SNAPSHOTS)


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_a_full_disk_is_told_with_the_path(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small") as disk:
        with pytest.raises(RunError, match=r"worker-0\.3 could not be written: No space left on device"):
            written(disk / SNAPSHOTS)
        assert list((disk / SNAPSHOTS).iterdir()) == []


def test_more_than_announced_or_allowed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="announced a snapshot of more than 399999 bytes"):
        SnapshotWriter(tmp_path / SNAPSHOTS, 0, NOTE, PARAMS.nbytes - 1)
    arriving = SnapshotWriter(tmp_path / SNAPSHOTS, 0, {**NOTE, "tick": math.inf}, PARAMS.nbytes)
    with pytest.raises(ProtocolError, match="sent more bytes of a snapshot"):
        arriving.add(np.zeros(PARAMS.nbytes + 8, np.uint8))
    arriving.drop()
    assert list((tmp_path / SNAPSHOTS).iterdir()) == []


def test_a_node_sends_no_more_than_a_window_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Supervisor and node in one process: each time that the node waits, the supervisor takes all there is."""
    part = 1 << 10  # a window fits into the socket
    monkeypatch.setattr("flockstep.runtime.member.PART", part)
    schema = Schema.of({"w": (4 * part,)}, "float32")
    control = Control(f"ipc://{tmp_path}/control", 5.0)
    member = Member(NodeSpec("run", 0, control.address, str(tmp_path), "ipc", 5.0, "", 1, 0), schema)
    member.introduce("bsp", {})
    words, frames = next(control.heard())
    wire = ProcessLink(frames, msgspec.msgpack.decode(words, type=Hello))
    tell, sent, taken, ahead = member.tell, list[str](), list[FlatArray](), list[int]()

    def counted(tag: str, array: FlatArray | None = None, note: Fields | None = None) -> None:
        sent.append(tag)
        tell(tag, array, note)

    def take(seconds: float) -> None:
        ahead.append(sent.count("part") - len(taken))
        control.wait([frames], seconds)
        while (message := wire.receive()) is not None:
            if message.tag == "part":
                taken.append(np.array(message.payload))
                wire.tell("taken")

    member.tell, member.line.wait = counted, take  # type: ignore[method-assign]
    params = np.arange(4 * part, dtype=np.float32)
    member.send_in_parts({"tick": 0.0}, [params])
    while len(taken) * part < params.nbytes:
        take(1.0)
    assert max(ahead) == WINDOW
    assert np.array_equal(np.concatenate(taken).view(np.float32), params)
    wire.close()
    member.close(0.0)
    control.close()


def sends_of(size: int, alike: bool) -> tuple[list[Worker], list[tuple[int, float]], Callable[[float], None]]:
    """Three workers; a list of rank and time of each snapshot that they send; and a function that sets the time."""
    stepper: Any = SimpleNamespace()
    workers, sent = list[Worker](), list[tuple[int, float]]()
    senders = list[SnapshotSender]()
    for rank in range(3):
        member: Any = SimpleNamespace(send_in_parts=lambda note, _, rank=rank: sent.append((rank, note["seconds"])))
        params = np.broadcast_to(np.zeros(1, np.float32), (size,))  # of any size without memory
        workers.append(Worker(rank, Cluster(3, 0), params, np.random.default_rng(0), stepper, None))
        senders.append(SnapshotSender(member, alike))

    def look(time: float) -> None:
        for sender, worker in zip(senders, workers, strict=True):
            sender.newest(worker, lambda: time, 0)

    return workers, sent, look


def test_equal_replicas_send_one_newest_model() -> None:
    """The worker of the lowest rank that takes part sends it; where replicas differ, all do."""
    workers, sent, look = sends_of(10, alike=True)
    look(1.5)
    assert sent == [(0, 1.5)]
    for worker in workers:
        worker.view = worker.view.without(0)
    look(20.0)
    assert sent[1:] == [(1, 20.0)]
    _, sent, look = sends_of(10, alike=False)
    look(1.5)
    assert [rank for rank, _ in sent] == [0, 1, 2]


def test_the_first_snapshot_of_a_large_model_takes_a_small_share_of_the_time_too() -> None:
    """A model of 400 MB takes about 0.4 s, so the first is sent after 20 s."""
    _, sent, look = sends_of(100_000_000, alike=True)
    look(19.9)
    assert not sent
    look(20.1)
    assert sent == [(0, 20.1)]
