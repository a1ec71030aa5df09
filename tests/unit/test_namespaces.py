"""Links between network namespaces: their description, and where there can be none. Real ones: tests/end_to_end."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flockstep.costs.cluster_file import read_cluster, to_toml
from flockstep.errors import ConfigurationError
from flockstep.simulation import units
from flockstep.simulation.fair import FairLink
from flockstep.simulation.network import Link
from flockstep.simulation.tiers import Tiers
from flockstep_lab import namespaces
from flockstep_lab.namespaces import Card, Namespaces, free_of, limit, parse_links, subnets, sweep
from support.processes import PATIENCE


@pytest.mark.parametrize(
    ("bandwidth", "burst", "segment"),
    [
        ("1gbit", "125000", "65536"),
        ("300mbit", "37500", "30000"),
        ("100mbit", "12500", "10000"),
        ("5mbit", "3200", "2560"),
    ],
)
def test_a_link_lets_a_millisecond_through_at_once_but_two_packets_at_least(
    bandwidth: str, burst: str, segment: str
) -> None:
    card, bucket = limit("eth0", units.bandwidth(bandwidth))
    assert bucket[bucket.index("burst") + 1] == burst
    assert card[card.index("gso_max_size") + 1] == segment  # a segment fits into a burst, so that none is split


def test_refused_without_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigurationError, match="root"):
        namespaces.require()
    with pytest.raises(ConfigurationError, match="root"):
        Namespaces().prepare(tmp_path)


LINKS = """\
1: lo: <LOOPBACK,UP,LOWER_UP> mtu 65536 qdisc noqueue state UNKNOWN mode DEFAULT group default qlen 1000
4: eth0: <BROADCAST> mtu 1400 state UP qlen 1000\\    link/ether 02:fc:00:00:00:01\\    alias 7
5: fs12: <BROADCAST,MULTICAST> mtu 1500 state UP qlen 1000\\    link/ether 02:00:00:00:00:01\\    alias 345
6: fs12h2@if2: <BROADCAST> mtu 1500 master fs12 state UP\\    link/ether 02:00:00:00:00:05 link-netnsid 0
7: fs13h4@if2: <BROADCAST> mtu 1500 state UP\\    link/ether 02:00:00:00:00:06 link-netnsid 0
8: fsx: <BROADCAST> mtu 1500 state UP
"""


def test_links_tell_whose_they_are() -> None:
    assert parse_links(LINKS) == [Card("fs12", 12, "345"), Card("fs12h2", 12, ""), Card("fs13h4", 13, "")]


@pytest.mark.parametrize(
    ("alive", "removed"),
    [
        ({12: "345", 13: "9"}, []),
        ({12: "345"}, ["fs13h4"]),  # hosts that a dead supervisor left, whatever they are joined to
        ({12: "346", 13: "9"}, ["fs12h2", "fs12"]),  # its number is another process's by now
        ({}, ["fs12h2", "fs12", "fs13h4"]),
    ],
)
def test_what_dead_supervisors_left_is_taken_away(
    alive: dict[int, str], removed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(namespaces, "_started", alive.get)
    monkeypatch.setattr(namespaces, "_run", ran.append)
    sweep(parse_links(LINKS))
    assert sorted(ran) == sorted(["ip", "link", "del", name] for name in removed)
    assert [one[-1] for one in ran if "12" in one[-1]] == [name for name in removed if "12" in name]


def test_a_process_that_has_ended_was_not_started() -> None:
    assert (namespaces._started(os.getpid()) or "").isdecimal()
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert namespaces._started(process.pid) is None  # a zombie
    assert namespaces._started(process.pid) is None


@pytest.mark.parametrize(
    ("said", "is_free"),
    [
        ("default via 192.0.2.1 dev eth0", True),
        ("0.0.0.0/1 via 10.8.0.1 dev tun0\n128.0.0.0/1 via 10.8.0.1 dev tun0", True),
        ("10.70.4.0/24 dev fs9 proto kernel scope link src 10.70.4.1", True),
        ("10.70.3.0/24 dev fs9 proto kernel scope link src 10.70.3.1", False),
        ("10.0.0.0/8 via 192.0.2.1 dev eth0", False),
        ("local 10.70.3.77 dev lo table local", False),
        ("4: eth0    inet 10.70.0.9/16 brd 10.70.255.255 scope global eth0", False),
    ],
)
def test_a_network_that_the_machine_routes_is_not_taken(said: str, is_free: bool) -> None:
    assert list(free_of(said, ["10.70.3"])) == ["10.70.3"] * is_free


def test_there_are_networks_besides_those_of_ten() -> None:
    assert len(set(subnets(4711))) == 190 * 250 + 16 * 256 + 256
    said = "10.0.0.0/8 via 192.0.2.1 dev eth0"
    assert next(free_of(said, subnets(4711))).startswith("172.")


TWO_AT_ONCE = """
import os, subprocess, sys
from pathlib import Path
from flockstep_lab.namespaces import Namespaces
folder = Path(sys.argv[1]) / sys.argv[2]
folder.mkdir()
Namespaces().prepare(folder)
print((folder / "bridge").read_text(), flush=True)
sys.stdin.read()
Namespaces().clean_up(folder)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "nsenter", "unshare"))),
    reason="network namespaces need Linux, root, ip, tc, nsenter and unshare",
)
def test_runs_that_begin_at_once_share_no_network_and_dead_ones_leave_none(tmp_path: Path) -> None:
    """In a network namespace of their own, where somebody routes what the first one would take."""
    if subprocess.run(["unshare", "-n", "ip", "link", "add", "fs1", "type", "bridge"], check=False).returncode:
        pytest.skip("this machine allows no bridges")
    (tmp_path / "two.py").write_text(TWO_AT_ONCE)
    script = f"""
set -e
ip link set lo up
ip link add fs4194999 type bridge && ip link set fs4194999 up
ip link add fs4194999h2 type veth peer name other && ip link set fs4194999h2 master fs4194999
ip route add 10.0.0.0/8 dev lo
cd {tmp_path}
mkfifo stop
for one in a b c; do {sys.executable} two.py . $one <stop >$one.said & done
exec 3>stop
until [ "$(sleep 0.05; cat a.said b.said c.said | wc -l)" = 3 ]; do :; done
ip -o link > during
exec 3>&-
wait
ip -o link > after
"""
    subprocess.run(["unshare", "-n", "sh", "-c", script], check=True, timeout=PATIENCE)
    said = {(tmp_path / f"{one}.said").read_text().strip() for one in "abc"}
    assert len(said) == 3
    assert all(one.split()[1].startswith("172.") for one in said)
    during = parse_links((tmp_path / "during").read_text())
    assert len(during) == 3
    assert 4194999 not in {card.supervisor for card in during}
    assert parse_links((tmp_path / "after").read_text()) == []


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
    for shape, card in ((in_turn, Link(12.5e6)), (shared, FairLink(12.5e6))):
        assert shape.network() == Tiers((1,) * 4, (0,) * 4, (Link(math.inf),), (card,))
    assert read_cluster(to_toml(shared, ()), "c").wires == shared.wires
    assert "fair" not in to_toml(in_turn, ())
    with pytest.raises(ConfigurationError, match="fair must be true or false"):
        read_cluster(CLUSTER + "fair = 1\n", "c")
