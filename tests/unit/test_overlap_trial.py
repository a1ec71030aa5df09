"""When gradients travel is chosen by the times of both ways."""

from __future__ import annotations

import pytest

from flockstep.strategies.overlap_trial import AGAIN, TRIED, OverlapTrial


def tried(during: float, after: float) -> OverlapTrial:
    """A trial in which both ways have been timed; one step of each takes much longer, as with an evaluation."""
    trial = OverlapTrial()
    for step in range(2 * TRIED):
        early = trial.next
        assert early == (step < TRIED)
        due = trial.stepped(100.0 if step % TRIED == 3 else during if early else after)
        assert due == (step == 2 * TRIED - 1)
    return trial


@pytest.mark.parametrize(("during", "after", "early"), [(1.0, 2.0, True), (2.0, 1.0, False), (1.0, 1.0, True)])
def test_the_faster_way_is_chosen_by_the_shortest_step_of_each(during: float, after: float, early: bool) -> None:
    trial = tried(during, after)
    assert (trial.during, trial.after) == (during, after)
    trial.choose(trial.during, trial.after)
    assert trial.next == early
    assert trial.renewed() is trial
    assert not trial.stepped(0.001), "later steps change nothing"
    assert (trial.during, trial.after, trial.next) == (during, after, early)


def test_workers_choose_by_common_times_and_not_by_their_own() -> None:
    trial = tried(2.0, 1.0)
    trial.choose(1.5, 1.6)
    assert trial.next


def test_both_ways_are_timed_again() -> None:
    trial = tried(1.0, 2.0)
    while trial.steps < AGAIN:
        assert trial.renewed() is trial
        trial.stepped(1.0)
    assert trial.renewed() == OverlapTrial()
