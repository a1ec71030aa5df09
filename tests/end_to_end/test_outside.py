"""A strategy from outside: planned and compared with nothing edited but one registration."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from flockstep import registry
from flockstep.cli.app import run
from flockstep.costs.cluster_file import load_cluster
from flockstep.planning.advice import UNCOUNTED
from flockstep.planning.job_profile import Site, task_of
from flockstep.planning.plan import candidates, plan

SOURCE = '''
"""Each worker sends its parameters to the next in a ring every few steps, and takes a share of what it receives."""

from dataclasses import dataclass

from flockstep import registry
from flockstep.nodes import Worker
from flockstep.strategies.base import TaxonomyEntry, Strategy, Traits


@dataclass(frozen=True)
class Relay(Strategy):
    """Not published."""

    period: int = 3
    share: float = 0.5

    @property
    def traits(self) -> Traits:
        return Traits(delivery="partial", survives=False, results=("mean", "rank0"))

    @property
    def taxonomy_entry(self) -> TaxonomyEntry:
        return TaxonomyEntry("decentral", "sync", "reduce", "closed ring")

    async def worker(self, me: Worker) -> None:
        while me.training:
            me.optimizer_step(await me.gradient())
            if me.step % self.period == 0 and me.workers > 1:
                me.send((me.rank + 1) % me.workers, "model", me.params)
                other = await me.receive("model", (me.rank - 1) % me.workers)
                me.params += self.share * (other.payload - me.params)


registry.register("strategy", "relay", Relay)
'''
WORKERS = 4
PLAN = f"plan softmax --budget 0 -c lab-1gbit -n {WORKERS} -s relay -s all_reduce".split()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    for noun in registry.nouns():
        monkeypatch.setitem(registry._TABLE, noun, dict(registry._TABLE[noun]))
    monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))
    monkeypatch.setattr(registry, "_names", dict(registry._names))
    path = tmp_path / f"{request.node.name}.py"  # a process imports a file of one name once
    path.write_text(SOURCE)
    return path


def test_a_plan_lists_a_strategy_that_raises_an_error_with_its_line(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(SOURCE.replace("self.share *", "self.nonsense *"))
    assert run([*PLAN, "--import", str(file)]) == 0
    said = re.sub(r"\s+", "", capsys.readouterr().out)
    assert re.search(
        r"relay:worker\datstep\d+raisedAttributeError:'Relay'objecthasnoattribute'nonsense'\(test_a_plan", said
    )


def test_a_strategy_from_outside_is_planned(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*PLAN, "--json", "--import", str(file)]) == 0
    said = json.loads(capsys.readouterr().out)
    (found,) = (one for one in said["strategies"] if one["name"] == "relay")
    assert found["sent_bytes"] == pytest.approx(4 * said["parameters"] / 3, rel=0.02)
    assert found["criteria"]["hyper_parameters"] == 2


def test_a_strategy_that_records_no_updates_is_not_advised(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a taxonomy entry, either, nothing says what its samples are worth, however fast it takes them."""
    file.write_text(SOURCE.replace("def taxonomy_entry", "def other"))
    assert run([*PLAN, "--json", "--import", str(file)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert "relay" in {one["name"] for one in said["strategies"]}
    assert {"name": "relay", "why": UNCOUNTED} in said["advice"]["excluded"]
    assert "all_reduce" not in {one["name"] for one in said["advice"]["excluded"]}


def test_it_is_among_all_and_its_step_is_its_messages(file: Path) -> None:
    site = Site(task_of("softmax"), load_cluster("lab-1gbit"))
    assert "relay" not in {name for name, _ in candidates((), site)}
    runpy.run_path(str(file), run_name="relay_from_outside")
    assert "relay" in {name for name, _ in candidates((), site)}
    seldom, often = plan(
        site.task, site.cluster, WORKERS, strategies=("relay(period=4)", "relay(period=1)")
    ).predictions[:2]
    if seldom.name != "relay(period=4)":
        seldom, often = often, seldom
    latency, bandwidth = site.link
    assert often.seconds - seldom.seconds == pytest.approx(0.75 * (latency + site.task.nbytes / bandwidth), rel=0.2)


def test_it_is_compared(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "softmax", "-s", "relay", "-s", "all_reduce", "--simulate", "--workers", str(WORKERS)]
    more = ["--steps", "12", "--network", "1gbit", "--compute", "constant(0.01)", "--out", str(tmp_path / "compared")]
    assert run([*words, *more, "--import", str(file)]) == 0, capsys.readouterr()
    page = (tmp_path / "compared" / "report.html").read_text("utf-8")
    assert page.count("rehearsal, link(") == 3  # one worker alone is the third
