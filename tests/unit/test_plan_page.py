"""The page of a plan: its curves, its map, and that both stand there as tables too."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from flockstep.costs.cluster_reading import read_cluster
from flockstep.planning.advice import advise
from flockstep.planning.job_profile import JobProfile, Site
from flockstep.planning.page import CELLS, Map, best_map, plan_page, scaling_picture, scaling_table
from flockstep.planning.plan import Outlook, plan
from flockstep.planning.scaling import WORKERS
from flockstep.planning.step_prediction import Pace, predict_step
from flockstep.report.page import Listing
from flockstep.strategies.base import Strategy

TASK = JobProfile("surrogate", 100_000, ((400, 200), (20_000,)))
CLUSTER = read_cluster(
    'compute = "constant(0.01)"\n[nodes.machines]\ncount = 4\n[[links]]\ninside = "machines"\n'
    'bandwidth = "100mbit"\nlatency = "50us"\n',
    name="test",
)


@pytest.fixture(scope="module")
def outlook() -> Outlook:
    return plan(TASK, CLUSTER, strategies=("all_reduce", "ps", "local_sgd(period=8)", "dpsgd"))


def test_curves_go_to_1024_and_have_marks_of_their_own(outlook: Outlook) -> None:
    drawn = scaling_picture(outlook)
    assert drawn["layout"]["xaxis"]["tickvals"] == list(WORKERS)
    assert drawn["layout"]["xaxis"]["ticktext"][-1] == "1,024"
    *curves, alone = drawn["data"]
    assert (alone["name"], alone["y"]) == ("one worker", [1, 1])
    assert [one["y"] for one in curves] == [one.speedups for one in outlook.curves]
    assert len({(one["line"]["color"], one["marker"]["symbol"]) for one in curves}) == len(curves) == 4
    listed = scaling_table(outlook)
    assert [row[0] for row in listed.rows] == [one["name"] for one in curves]
    assert all(len(row) == len(listed.headings) for row in listed.rows)


def test_the_map_says_the_same_in_colors_and_in_letters(outlook: Outlook) -> None:
    found = best_map(outlook, advise(outlook))
    assert found is not None
    assert len(found.names) == len(found.names[0]) == CELLS
    assert found.bandwidths[CELLS // 2] == pytest.approx(outlook.site.link[1])
    heat = found.picture(outlook)["data"][0]
    listed = found.table()
    assert [list(row[1:]) for row in listed.rows] == heat["text"][::-1]
    for kind in found.kinds:
        assert f"{found.letter(kind)}: {kind}" in listed.note
    assert len({heat["colorscale"][2 * i][1] for i in range(len(found.kinds))}) == len(found.kinds)


def test_what_trials_found_stands_before_the_predictions(outlook: Outlook) -> None:
    found = Listing("Trials", "in virtual time", ("strategy", "best found"), [("ps", "3 s")])
    page = plan_page(outlook, advise(outlook), [found])
    assert [one.heading for one in page.listings][:2] == ["Trials", "Predictions"]
    assert "in virtual time" in page.render()


def test_ticks_are_powers_of_ten_in_words() -> None:
    made = Map((1.25e5, 1.25e9), (300.0, 3e6), (("a", "b"), ("b", "b")))
    assert made.kinds == ["a", "b"]
    assert list(made.table().headings) == ["parameters", "1 Mbit/s", "10 Gbit/s"]
    assert [row[0] for row in made.table().rows] == ["3.00 M", "300"]


def test_everything_drawn_is_explained_and_listed(outlook: Outlook) -> None:
    text = plan_page(outlook, advise(outlook)).render()
    for heading in ("How it scales", "Best strategy by bandwidth and number of parameters", "Predictions", "Criteria"):
        assert f"<h2>{heading}" in text or f'-title">{heading}</h2>' in text
    for block in re.findall(r'<script type="application/json" id="[a-z]+-data">(.*?)</script>', text, re.DOTALL):
        assert json.loads(block)["layout"]["xaxis"]["title"]["text"]
    assert text.count('<tr class="chosen">') == 2


@pytest.mark.parametrize("text", ["adpsgd", "ps(consistency=backup(b=1))", "all_reduce"])
def test_alone_a_strategy_is_no_faster_than_one_worker(text: str) -> None:
    """Whoever takes more steps than the mean of all says does so only where somebody waits."""
    site = Site(TASK, CLUSTER)
    known = Pace(Strategy.parse(text), site, predict_step(Strategy.parse(text), site, 4))
    single = TASK.batch / 0.01
    assert known.at(site, 4).samples_per_second == pytest.approx(
        predict_step(Strategy.parse(text), site, 4).samples_per_second
    )  # fmt: skip
    if "backup" not in text:
        assert known.at(site, 1).samples_per_second <= single


def test_close_values_have_ticks_too(outlook: Outlook) -> None:
    up = scaling_picture(outlook)["layout"]["yaxis"]
    assert len(up["tickvals"]) == len(up["ticktext"]) >= 2


def test_the_map_and_the_tables_heed_needs(outlook: Outlook) -> None:
    advice = advise(outlook, ("unbalanced",))
    found = best_map(outlook, advice)
    assert found is not None
    assert set(found.kinds) <= {"all_reduce", "ps(consistency=bsp)", "one worker"}
    page = plan_page(outlook, advice)
    assert any(heading == "Ruled out" and said for heading, said in page.lists)
    rows = next(one.rows for one in page.listings if one.heading == "Predictions")
    speedups = [advice.speedups[row[0]] for row in rows]
    assert speedups == sorted(speedups, reverse=True)


def test_without_anything_that_fits_there_is_no_map() -> None:
    small = dataclasses.replace(
        CLUSTER, groups=tuple(dataclasses.replace(one, memory=1000.0) for one in CLUSTER.groups)
    )
    outlook = plan(TASK, small, strategies=("all_reduce", "ps"))
    advice = advise(outlook)
    assert advice.choice is None
    assert best_map(outlook, advice) is None
    text = plan_page(outlook, advice).render()
    assert "No strategy meets the requirements" in text
    assert '<tr class="chosen">' not in text
