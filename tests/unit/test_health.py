"""Which nodes are lost, by a clock of the test's own: a link is enough to tell, an exit code tells more."""

from __future__ import annotations

from typing import Any

import pytest

from flockstep.launchers.out_of_memory import OutOfMemoryDetector
from flockstep.launchers.peers import SETTLING, RunPeer, RunPeers


class Process:
    """A process that ends when the test says so."""

    reason: str | None = None

    def __init__(self) -> None:
        self.code: int | None = None

    def exit_code(self) -> int | None:
        return self.code


class Link:
    """A link that breaks when the test says so."""

    def __init__(self) -> None:
        self.broken = False

    def disconnected(self) -> bool:
        told, self.broken = self.broken, False
        return told


class Watched:
    """One node, with or without a process of this host."""

    def __init__(self, local: bool):
        self.time, self.process, self.link = 0.0, Process(), Link()
        self.watch(local)

    def watch(self, local: bool, memory: OutOfMemoryDetector | None = None) -> None:
        one: Any = (peers := RunPeers(1, 5.0, memory=memory, now=lambda: self.time))[0]
        one.child, one.link, self.peers = self.process if local else None, self.link, peers

    def gone(self, later: float = 0.0) -> str | None:
        self.time += later
        return self.peers.how_lost(0)


@pytest.mark.parametrize(
    ("local", "said"),
    [(True, "worker 0 has not answered for 5 s"), (False, "worker 0 has ended, or has not answered for 5 s")],
)
def test_a_broken_link_is_enough(local: bool, said: str) -> None:
    node = Watched(local)
    assert node.gone(1000.0) is None
    node.link.broken = True
    assert node.gone() is None, "its last words may still arrive"
    assert node.gone(1.01 * SETTLING) == said
    assert node.peers.ended(0) is not local, "a process that is stopped has not ended"


def test_an_exit_code_and_a_broken_link_together_tell_at_once() -> None:
    node = Watched(local=True)
    node.process.code, node.link.broken = -9, True
    assert node.gone() == "worker 0 was killed by SIGKILL"
    assert node.peers.ended(0)


def test_what_another_host_says_of_the_end_is_believed() -> None:
    """It judges by its own memory, not by that of this host."""
    node = Watched(local=True)
    node.watch(True, OutOfMemoryDetector(iter((3, 4)).__next__))
    node.process.code, node.link.broken, node.process.reason = -9, True, ""
    assert node.gone() == "worker 0 was killed by SIGKILL"
    node.process.reason = ", probably there"
    assert node.gone() == "worker 0 was killed by SIGKILL, probably there"


def test_an_exit_code_alone_tells_after_the_last_words() -> None:
    node = Watched(local=True)
    node.process.code = 3
    assert node.gone() is None
    assert node.gone(1.01 * SETTLING) == "worker 0 exited with code 3"


def test_the_slowest_worker_that_lives_tells_how_far_a_run_is() -> None:
    peers = RunPeers(3, 5.0)
    for rank, step in enumerate((7, 3, 5)):
        peers[rank].step = step
    peers[-1] = RunPeer()
    assert peers.least_step == 3
    peers[1].gone = True
    assert peers.least_step == 5
