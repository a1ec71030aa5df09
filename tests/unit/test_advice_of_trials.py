"""Advice where some strategies were tried, and others were not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flockstep.planning.advice import advise
from flockstep.planning.job_profile import JobProfile
from flockstep.planning.plan import Outlook, plan
from flockstep.planning.search import Found
from flockstep.planning.step_prediction import ALONE
from flockstep.planning.trials import Trial
from support.clusters import equal_machines

TARGET = 0.9
CLUSTER = equal_machines("100mbit", "exponential(0.02)", latency="1ms")


@pytest.fixture(scope="module")
def outlook() -> Outlook:
    strategies = "all_reduce", "local_sgd(period=8)", "ps(consistency=backup(1))"
    return plan(
        JobProfile("surrogate", 210, known_noise=10.0),
        CLUSTER,
        strategies=strategies,
    )


def tried(name: str, seconds: float | None) -> Found:
    end = "target" if seconds is not None else "time"
    return Found(name, (Trial(name, 4, 0.1, 0, TARGET, end, seconds, 5.0, 10, 100, 0.5, 0.5),))


def test_advice_from_some_of_the_trials_says_that_it_is_partial(outlook: Outlook) -> None:
    names = [one.name for one in outlook.predictions]
    whole = advise(outlook, (), [tried(name, 3) for name in names], names)
    assert not any("partial" in said for said in whole.sentences)
    planned = advise(outlook).choice
    assert planned is not None
    assert planned.name != ALONE
    assert whole.choice is not None
    assert whole.choice.name == ALONE  # as fast as all others, and the simplest
    assert whole.sentences[1].endswith("trained as fast; one worker is the simplest of them.")
    some = advise(outlook, (), [tried(ALONE, 3)], names)
    said = " ".join(some.sentences)
    assert f"This advice is partial: of {len(names)} strategies only 1 was tried" in said
    assert f"The plan alone would recommend {planned.name}, which was not tried." in said
    assert set(some.untried) == set(names) - {ALONE}
    assert some.document()["untried"] == list(some.untried)
    none = advise(outlook, (), [], names)
    assert "none was tried" in " ".join(none.sentences)


@pytest.mark.parametrize(("alone", "choice"), [((3.2, 3.3, 4.0), ALONE), ((3.2, 3.35, 4.0), "all_reduce")])
def test_one_worker_is_advised_where_it_takes_at_most_a_tenth_longer(
    alone: tuple[float, ...], choice: str, outlook: Outlook
) -> None:
    def several(name: str, times: tuple[float, ...]) -> Found:
        return Found(name, tuple(replace(tried(name, time).trials[0], seed=seed) for seed, time in enumerate(times)))

    found = [several(ALONE, alone), several("all_reduce", (2.6, 3.02, 3.4))]
    advised = advise(outlook, (), found, [ALONE, "all_reduce"]).choice
    assert advised is not None
    assert advised.name == choice


def test_what_was_not_tried_is_never_preferred_silently(outlook: Outlook) -> None:
    names = [one.name for one in outlook.predictions]
    first = advise(outlook).choice
    assert first is not None
    advice = advise(outlook, (), [tried(first.name, None)], names)
    assert advice.choice is not None
    assert advice.choice is not first
    told = f"No tried strategy reached the target; the plan alone recommends {advice.choice.name}."
    assert told in " ".join(advice.sentences)
    refused = advise(outlook, (), [Found(first.name, (), "no such thing")], names)
    assert dict(refused.excluded)[first.name] == "cannot be tried: no such thing"
    assert refused.choice is not first


def test_the_simplest_is_chosen_within_the_range_of_the_fastest(outlook: Outlook) -> None:
    def runs(name: str, *seconds: float) -> Found:
        return Found(name, tuple(tried(name, one).trials[0] for one in seconds))

    local, every = "local_sgd(period=8)", "all_reduce"
    found = [runs(ALONE, 8, 9, 10), runs(local, 3, 4, 5), runs(every, 4.2, 4.3, 6)]
    advice = advise(outlook, (), found)
    assert advice.choice is not None
    assert advice.choice.name == every
    assert advice.sentences == (
        (
            "Use all_reduce with learning rate 0.1 on 4 workers: in trials on the job, it trained 2.1 times as fast as "
            "one worker at the best learning rate of each (1.3 to 2.4 times over 3 seeds)."
        ),
        "Within the ranges of the trials, local_sgd(period=8) trained as fast; all_reduce is the simplest of them.",
    )
    dearer = advise(outlook, (), [*found[:2], runs(every, 4.4, 4.6, 6)]).choice
    assert dearer is not None
    assert dearer.name == local, "a simpler strategy may take a tenth longer"
    assert advice.speedups[local] == 9 / 4
    clear = advise(outlook, (), [found[0], found[1], runs(every, 5.1, 5.2, 6)])
    assert clear.choice is not None
    assert clear.choice.name == local
    missed = advise(outlook, (), [found[0], found[1], tried(every, None)])
    assert missed.speedups[every] <= 9 / 5  # its trial ended after 5 s
    slower = advise(outlook, (), [runs(ALONE, 3, 3.5, 4), runs(local, 8, 9, 10)])
    assert slower.choice is outlook.alone
    assert slower.sentences == (
        (
            "Use one worker with learning rate 0.1: in trials on the job, none of 1 strategy was faster by "
            "more than a tenth; the best trained 39 % as fast."
        ),
    )
