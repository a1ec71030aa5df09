"""What claim C19 observes: rows of the failure table and shares of a delay; wrong ones are noticed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from flockstep.strategies.base import Strategy
from flockstep_lab import failures
from flockstep_lab.claims import c19_resilience, delay_share, real_faults
from flockstep_lab.claims.failure_table import FAMILIES, Expectation, Short
from flockstep_lab.failure_matrix import WORDS

BY_NAME = {family.name: family for family in FAMILIES}


def test_every_family_has_examples_that_can_run() -> None:
    for family in FAMILIES:
        for example in family.examples:
            Strategy.parse(example).check(failures.WORKERS)


def test_every_expected_word_is_one_that_can_be_observed() -> None:
    known = [*WORDS, *(f"{word}, up to {b} of 4" for word in (failures.GOES_ON, failures.EXACT) for b in (1, 2))]
    known += ["no effect of up to 1 of 4 slow workers", "no effect of up to 2 of 4 slow workers"]
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
    assert "ends with an error that names the dead worker" in short["local_sgd, dead worker"]


@pytest.mark.negative_control("strategy:gossip")
def test_a_wrong_cell_is_noticed() -> None:
    wrong = dataclasses.replace(BY_NAME["GoSGD"], slow=Expectation("all workers slow down", (failures.EVERYONE,)))
    short = [(row.what, why) for row, why in c19_resilience.cells(wrong) if not row.holds]
    assert short == [("gossip(p=0.5), slow worker", f"unexpected: {failures.FREE}")]


def test_a_word_may_go_on_where_its_cell_says_so() -> None:
    cell = Expectation("free", ("no effect for …", "nothing"))
    assert cell.holds("no effect for 3 steps, then all workers slow down")
    assert cell.holds("nothing")
    assert not cell.holds("nothing else")


@pytest.mark.parametrize(("strategy", "share"), [("ps(bsp)", 1.0), ("asgd", 1 / 4), ("gossip", 1 / 4)])
def test_the_share_of_a_slow_worker(strategy: str, share: float) -> None:
    loss = delay_share.measured(strategy, 4, "slows(1, 4)")
    assert loss.exercised
    assert loss.share == pytest.approx(share, abs=0.03)


def test_a_fault_that_costs_its_victim_nothing_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = delay_share.measured("gossip", 4, "narrows(1, 40)")
    assert not loss.exercised
    assert np.isnan(loss.share)
    monkeypatch.setattr(c19_resilience, "SLOWED", {("central", "asynchronous"): ("asgd",)})
    monkeypatch.setattr(c19_resilience, "FAULTS", {"a link as before": "narrows({}, 1.001)"})
    (row,) = c19_resilience.shares_of_losses()
    assert "not tested: even the affected worker" in str(row.ours)
    assert not row.holds


def test_the_link_of_who_asks_matters_to_itself_and_that_of_who_answers_to_those_who_ask() -> None:
    asks = delay_share.measured("adpsgd", 8, "narrows(2, 40)", victim=2)
    assert asks.share == pytest.approx(1 / 8, abs=0.03)
    answers = delay_share.measured("adpsgd", 8, "narrows(1, 40)", victim=1)
    assert not answers.exercised
    assert answers.everyone > 0.1


def test_nobody_waits_for_gossip_and_who_does_is_noticed() -> None:
    assert c19_resilience.waits_for_nobody("gossip").holds
    assert not c19_resilience.waits_for_nobody("asgd").holds


def test_links_that_were_not_tried_are_rows_that_do_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c19_resilience, "KILLED", {})
    monkeypatch.setattr(c19_resilience, "why_not", lambda: "network namespaces need root")
    rows = list(c19_resilience.real(lambda what: None))
    assert [row.ours for row in rows] == ["not tested: network namespaces need root"] * len(c19_resilience.SHAPED)
    assert not any(row.holds for row in rows)


def test_a_reason_is_of_what_it_explains_only() -> None:
    cell = Expectation("yes", ("yes",), Short("it has none", ("no",)))
    assert [cell.why(word) for word in ("yes", "no", "perhaps")] == ["", "it has none", "unexpected: perhaps"]
    for family in FAMILIES:
        for one in (family.equal, family.dead, *family.lost, family.slow):
            assert one.short is None or not any(map(one.holds, one.short.seen))


def test_paces_are_of_the_time_in_which_all_train() -> None:
    times = [np.arange(1.0, 41), np.arange(2.0, 202, 2)]
    assert delay_share.paces(times) == pytest.approx([1, 0.5])


def test_what_no_link_can_be_narrowed_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_faults.os, "geteuid", lambda: 1000)
    assert "root" in real_faults.why_not()
    monkeypatch.setattr(real_faults.sys, "platform", "darwin")
    assert "Linux" in real_faults.why_not()
