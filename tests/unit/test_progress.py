"""Progress on standard error: all parts and the time left on a terminal, a line from time to time elsewhere."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from flockstep.cli import show
from flockstep.launchers.peers import RunPeer
from support.processes import PATIENCE, wait_until


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal of 100 columns on standard error."""
    file = io.StringIO()
    monkeypatch.setattr(show, "console", Console(file=file, force_terminal=True, color_system=None, width=100))
    return file


def test_parts_are_counted_and_the_rest_is_told(screen: io.StringIO) -> None:
    with show.status() as say:
        for number in range(4):
            say(f"part [{number}]", number, 4)
    assert re.search(r" 3/4 0:00:\d\d left part \[3\] ", screen.getvalue())


def test_a_simulation_counts_worker_steps(screen: io.StringIO) -> None:
    with show.bar("softmax, gossip") as tell:
        for done in range(0, 401, 100):
            tell(done, 400, done / 100)
    assert "400/400 worker-steps" in screen.getvalue()
    assert "left" in screen.getvalue()


def test_a_real_run_counts_the_mean_steps_of_its_workers(screen: io.StringIO) -> None:
    with show.standings("digits, bsp") as tell:
        tell({0: RunPeer("running", 10), 1: RunPeer("running", 20), -1: RunPeer("running", 999)}, 60)
    assert "15/60 steps" in screen.getvalue()
    assert "worker 1" in screen.getvalue()


def test_short_work_says_nothing_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with show.status() as say, show.bar("a") as tell, show.standings("b") as stand:
        say("part", 1, 4)
        tell(1, 4, 0.5)
        stand({0: RunPeer()}, 4)
    assert tuple(capsys.readouterr()) == ("", "")


@pytest.mark.parametrize("kind", ["work", "simulation", "run"])
def test_long_work_is_told_from_time_to_time_without_a_terminal(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show, "PERIOD", 0.01)
    said: list[str] = []

    def line(pattern: str) -> None:
        wait_until(lambda: said.append(capsys.readouterr().err) or re.search(pattern, said[-1]), PATIENCE, pattern)  # type: ignore[func-returns-value]

    if kind == "work":
        with show.status() as say:
            say("predicting easgd", 3, 40)
            line(r"(?m)^flockstep: predicting easgd, 3 of 40; \d+ s so far$")
    elif kind == "simulation":
        with show.bar("softmax, gossip") as tell:
            tell(100, 400, 1.5)
            line(r"(?m)^flockstep: worker-steps of softmax, gossip, virtual 1.5 s, 100 of 400; \d+ s so far$")
    else:
        with show.standings("digits, bsp") as stand:
            stand({0: RunPeer("running", 10), 1: RunPeer("running", 20), -1: RunPeer("running", 9)}, 60)
            line(r"(?m)^flockstep: steps of digits, bsp, 15 of 60; \d+ s so far$")
    capsys.readouterr()
    assert capsys.readouterr().err == ""
