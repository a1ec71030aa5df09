"""What claim C19 observes: cells of the table of failures, shares of a delay, and that wrong ones are noticed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from flockstep.claims import c19_resilience, slowed, struck
from flockstep.claims.failure_table import FAMILIES, Cell
from flockstep.strategies.base import Strategy
from flockstep.testing import failures
from flockstep.testing.failure_matrix import WORDS

BY_NAME = {family.name: family for family in FAMILIES}


def test_every_family_has_examples_that_can_run() -> None:
    for family in FAMILIES:
        for example in family.examples:
            Strategy.parse(example).check(failures.WORKERS)


def test_every_expected_word_is_one_that_can_be_observed() -> None:
    known = [*WORDS, *(f"{word}, up to {b} of 4" for word in (failures.GOES_ON, failures.EXACT) for b in (1, 2))]
    known += ["hidden up to 1 of 4", "hidden up to 2 of 4"]
    for family in FAMILIES:
        for cell in (family.equal, family.dead, *family.lost, family.slow):
            for word in cell.words:
                assert word in known or any(one.startswith(word.rstrip("…")) for one in known), word


def test_the_cells_of_a_family() -> None:
    seen = [row for row, _ in c19_resilience.cells(BY_NAME["GoSGD"])]
    assert [row.what.rpartition(", ")[2] for row in seen] == [
        "replicas equal", "dead worker", "lost message", "slow worker"
    ]  # fmt: skip
    assert all(row.holds for row in seen)


def test_a_cell_that_does_not_hold_says_why() -> None:
    short = {row.what: why for row, why in c19_resilience.cells(BY_NAME["local SGD (SparkNet, BMUF, DiLoCo)"]) if why}
    assert "names it" in short["local_sgd, dead worker"]


@pytest.mark.negative_control("strategy:gossip")
def test_a_wrong_cell_is_noticed() -> None:
    wrong = dataclasses.replace(BY_NAME["GoSGD"], slow=Cell("everyone s×", (failures.EVERYONE,)))
    assert [row.what for row, _ in c19_resilience.cells(wrong) if not row.holds] == ["gossip(p=0.5), slow worker"]


def test_a_word_may_go_on_where_its_cell_says_so() -> None:
    cell = Cell("free", ("free for …", "nothing"))
    assert cell.holds("free for 3 steps, then everyone s×")
    assert cell.holds("nothing")
    assert not cell.holds("nothing else")


@pytest.mark.parametrize(("strategy", "share"), [("ps(bsp)", 1.0), ("asgd", 1 / 4), ("gossip", 1 / 4)])
def test_the_share_of_a_slow_worker(strategy: str, share: float) -> None:
    assert slowed.measured(strategy, 4, "slows(1, 4)") == pytest.approx(share, abs=0.03)


def test_paces_are_of_the_time_in_which_all_train() -> None:
    times = [np.arange(1.0, 41), np.arange(2.0, 202, 2)]
    assert slowed.paces(times) == pytest.approx([1, 0.5])


def test_what_no_link_can_be_narrowed_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(struck.os, "geteuid", lambda: 1000)
    assert "root" in struck.why_not()
    monkeypatch.setattr(struck.sys, "platform", "darwin")
    assert "Linux" in struck.why_not()
