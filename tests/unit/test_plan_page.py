"""The page of a plan: its sentences and its tables."""

from __future__ import annotations

import dataclasses

import pytest

from flockstep.experiments.planned import PlanResult
from flockstep.planning.advice import advise
from flockstep.planning.job_profile import JobProfile
from flockstep.planning.plan import Outlook, plan
from support.clusters import equal_machines

TASK = JobProfile("surrogate", 100_000, ((400, 200), (20_000,)))
CLUSTER = equal_machines("100mbit")


@pytest.fixture(scope="module")
def outlook() -> Outlook:
    return plan(TASK, CLUSTER, strategies=("all_reduce", "ps", "local_sgd(period=8)", "dpsgd"))


def test_the_page_has_its_tables(outlook: Outlook) -> None:
    text = PlanResult(outlook, advise(outlook)).page().render()
    assert "Predictions" in text
    assert "Criteria" in text
    assert text.count('<tr class="chosen">') == 2


def test_the_tables_heed_needs(outlook: Outlook) -> None:
    advice = advise(outlook, ("unbalanced",))
    page = PlanResult(outlook, advice).page()
    assert any(heading == "Ruled out" and said for heading, said in page.lists)
    rows = next(one.rows for one in page.tables if one.title == "Predictions")
    speedups = [advice.speedups[row[0]] for row in rows]
    assert speedups == sorted(speedups, reverse=True)


def test_without_anything_that_fits_no_row_is_chosen() -> None:
    small = dataclasses.replace(
        CLUSTER, groups=tuple(dataclasses.replace(one, memory=1000.0) for one in CLUSTER.groups)
    )
    outlook = plan(TASK, small, strategies=("all_reduce", "ps"))
    advice = advise(outlook)
    assert advice.choice is None
    text = PlanResult(outlook, advice).page().render()
    assert "No strategy meets the requirements" in text
    assert '<tr class="chosen">' not in text
