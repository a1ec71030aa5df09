"""Links between network namespaces: their description, and where there can be none. Real ones: tests/end_to_end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flockstep.costs.cluster_reading import read_cluster
from flockstep.costs.cluster_writing import to_toml
from flockstep.errors import ConfigurationError
from flockstep.launchers import namespaces
from flockstep.launchers.namespaces import Namespaces
from flockstep.simulation.fair import FairLink
from flockstep.simulation.network import Link


@pytest.mark.parametrize(("bandwidth", "burst"), [("1gbit", "125000"), ("100mbit", "12500"), ("5mbit", "3200")])
def test_a_link_lets_a_millisecond_through_at_once_but_two_packets_at_least(bandwidth: str, burst: str) -> None:
    assert Namespaces(bandwidth)._burst == burst


def test_refused_without_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigurationError, match="root"):
        namespaces.require()
    with pytest.raises(ConfigurationError, match="root"):
        Namespaces().listen(tmp_path, "control")


CLUSTER = """
compute = "constant(0.01)"
[nodes.machines]
count = 4
[[links]]
inside = "machines"
bandwidth = "100mbit"
"""


def test_a_cluster_says_whether_messages_share_its_links() -> None:
    in_turn, shared = read_cluster(CLUSTER, "c"), read_cluster(CLUSTER + "fair = true\n", "c")
    assert in_turn.network() == Link(12.5e6)
    assert shared.network() == FairLink(12.5e6)
    assert read_cluster(to_toml(shared, ()), "c").wires == shared.wires
    assert "fair" not in to_toml(in_turn, ())
    with pytest.raises(ConfigurationError, match="fair must be true or false"):
        read_cluster(CLUSTER + "fair = 1\n", "c")
