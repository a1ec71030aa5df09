"""Real runs over links that break: a synchronous run ends with the bits of a run over quiet links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.matrix import few
from support.processes import PATIENCE, Ended, RealRun

FAULTY_TCP = str(Path(__file__).parents[1] / "support" / "faulty_tcp.py")
CHANGED = "corrupt+drop+repeat+reorder"
"""Faults that only encryption notices."""
CASES = [
    ("all_reduce", "cut+close+late", False),
    ("all_reduce", CHANGED, True),
    ("all_reduce", "half_open", False),
    ("all_reduce", "delay+outage", False),
    ("ps(consistency=bsp)", "cut+late+delay", False),
    ("ps(consistency=bsp)", CHANGED, True),
    ("local_sgd", "cut+outage", False),
    ("dpsgd", "close+half_open", False),
]


def run(transport: str, strategy: str, folder: Path, *arguments: str) -> Ended:
    command = ["train", "softmax", "-s", strategy, "-n", "3", "--steps", "300", "--seed", "1", "--heartbeat", "5"]
    faulty = ["--transport", transport, "--import", FAULTY_TCP]
    return RealRun([*command, *faulty, *arguments], folder).end(PATIENCE)


@pytest.mark.parametrize(("strategy", "faults", "encrypt"), few(CASES, ("ps(consistency=bsp)", CHANGED, True)))
def test_a_synchronous_run_over_faulty_links_ends_with_the_same_bits(
    strategy: str, faults: str, encrypt: bool, tmp_path: Path
) -> None:
    log = tmp_path / "faults"
    faulty = f"faulty_tcp(faults='{faults}', seed=1, every=20000, encrypt={str(encrypt).lower()}, log='{log}')"
    quiet, found = run("ipc", strategy, tmp_path / "quiet"), run(faulty, strategy, tmp_path / "faulty")
    for one in (quiet, found):
        assert one.code == 0, one.err
        assert one.summary is not None
    assert found.summary["hashes"] == quiet.summary["hashes"]
    fired = {line.split()[1] for line in log.read_text().splitlines()}
    assert fired == set(faults.split("+")), "a fault did not fire"
    if fired - {"delay", "outage"}:
        assert re.search(r"is connected to (worker|server) \d again after", found.err)


def test_a_link_that_stays_away_longer_than_the_limit_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    log = tmp_path / "faults"
    faulty = f"faulty_tcp(faults='outage', seed=1, every=20000, encrypt=false, log='{log}', outage=1000)"
    ended = run(faulty, "all_reduce", tmp_path / "run", "--heartbeat", "3", "--link-timeout", "1")
    assert "outage" in log.read_text(), "the fault did not fire"
    assert ended.code == 1, ended.err
    why = r"nothing arrived for [0-9.]+ s, and the link was down for [0-9.]+ s, longer than the link timeout of 1 s"
    assert re.search(rf"flockstep: the connection to worker \d broke: {why}", ended.err)
