"""Replicas of several processes in runs over several hosts: where their processes are placed, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flockstep.errors import ConfigurationError
from flockstep.launchers.gathering import Gathering
from flockstep.launchers.meeting import Meeting
from flockstep.records.config import RunConfig
from support.hosts import Host, network, on_all, require, require_idle
from support.scripts import REPLICAS, of_replicas


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[Host]]:
    (tmp_path / "script.py").write_text(REPLICAS)
    with network(2) as hosts:
        yield hosts
        require_idle(hosts)


def test_a_replica_is_on_one_host_and_the_coordinator_says_on_which(two: list[Host], tmp_path: Path) -> None:
    """Divided evenly, the second of three replicas would be on both."""
    words = ["launch", "-n", "6", "--replica-size", "2", tmp_path / "script.py", "2"]
    ended = on_all(two, *words, first=["--out", tmp_path / "run"], torch=True)
    require(ended, 0, 0)
    of_replicas("".join(one.out for one in ended), 6, 2)
    said = "flockstep: replicas of 2 processes: 0 on node 0 (host0), 1 on node 1 (host1), 2 on node 1 (host1)\n"
    assert said in ended[0].err


@pytest.mark.full
def test_a_replica_is_over_hosts_if_asked_and_the_script_opens_its_group(two: list[Host], tmp_path: Path) -> None:
    asked = ["launch", "-n", "2", "--replica-size", "2", "--replica-over-hosts"]
    words = [*asked, tmp_path / "script.py", "2", f"tcp://{two[0].address}:29511"]
    ended = on_all(two, *words, first=["--out", tmp_path / "run"], torch=True)
    require(ended, 0, 0)
    of_replicas("".join(one.out for one in ended), 2, 2)
    assert "flockstep: replicas of 2 processes: 0 on node 0 (host0) and node 1 (host1)\n" in ended[0].err


def placed(workers: int, nodes: int, shares: tuple[int, ...] = (), over_hosts: bool | None = None) -> list[range]:
    """Ranks of each host, of replicas of two processes."""
    replicas = {"replica_size": 2, "replica_over_hosts": over_hosts}
    config = RunConfig(kind="launch", job="a.py", strategy="s", workers=workers, **replicas)
    return list(Gathering(Meeting("a", 1, b""), nodes, 0, shares=shares).placement(config).values())


def test_workers_are_divided_by_whole_replicas() -> None:
    assert placed(6, 2) == [range(2), range(2, 6)]
    assert placed(6, 2, over_hosts=True) == [range(3), range(3, 6)]
    assert placed(6, 2, shares=(4, 2)) == [range(4), range(4, 6)]
    assert placed(6, 2, shares=(3, 3), over_hosts=True) == [range(3), range(3, 6)]
    with pytest.raises(ConfigurationError, match="at least 6 workers for one replica of 2 processes on each, got 4"):
        placed(4, 3)
    with pytest.raises(ConfigurationError, match="but replica 1 of 2 processes has processes on node 0 and node 1; "):
        placed(6, 2, shares=(3, 3))
