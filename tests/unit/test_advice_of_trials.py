"""Advice where some strategies were tried, and others were not."""

from __future__ import annotations

import pytest

from flockstep.costs.cluster_reading import read_cluster
from flockstep.planning.advice import advise
from flockstep.planning.job_profile import JobProfile
from flockstep.planning.plan import Outlook, plan
from flockstep.planning.search import Found
from flockstep.planning.step_prediction import ALONE
from flockstep.planning.trials import Trial

TARGET = 0.9
CLUSTER = """
compute = "exponential(0.02)"
[nodes.machines]
count = 4
[[links]]
inside = "machines"
bandwidth = "100mbit"
latency = "1ms"
"""


@pytest.fixture(scope="module")
def outlook() -> Outlook:
    strategies = "all_reduce", "local_sgd(period=8)", "ps(consistency=backup(1))"
    return plan(
        JobProfile("surrogate", 210, known_noise=10.0),
        read_cluster(CLUSTER, name="test"),
        strategies=strategies,
        further=False,
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
    assert whole.sentences[0] == f"Use {whole.choice.name} on 4 workers: in trials it reached the target first."
    some = advise(outlook, (), [tried(ALONE, 3)], names)
    said = " ".join(some.sentences)
    assert f"This advice is partial: of {len(names)} strategies only 1 was tried" in said
    assert f"The plan alone would recommend {planned.name}, which was not tried." in said
    assert set(some.untried) == set(names) - {ALONE}
    assert some.document()["untried"] == list(some.untried)
    none = advise(outlook, (), [], names)
    assert "none was tried" in " ".join(none.sentences)


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
