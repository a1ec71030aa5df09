"""Python's garbage collector during a simulation: none of its settings is left changed."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from flockstep.errors import RunError
from flockstep.simulation.collector import ALLOCATIONS, seldom
from flockstep.testing.strategies import Watched, run_strategy


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """As in a fresh process, and put back."""
    threshold = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    assert gc.get_freeze_count() == 0
    yield
    gc.set_threshold(*threshold)
    gc.unfreeze()


def test_within_a_simulation_the_collector_looks_seldom() -> None:
    seen = []

    class Looks(Watched):
        def send(self, to, message):
            seen.append((gc.get_threshold()[0], gc.get_freeze_count() > 0))
            super().send(to, message)

    run_strategy("all_reduce", 2, 3, simulation=Looks)
    assert set(seen) == {(ALLOCATIONS, True)}
    assert (gc.get_threshold(), gc.get_freeze_count()) == ((700, 10, 10), 0)


def test_an_error_leaves_nothing_behind() -> None:
    with pytest.raises(RunError, match="as meant"), seldom(), seldom():
        raise RunError("as meant")
    assert (gc.get_threshold(), gc.get_freeze_count()) == ((700, 10, 10), 0)


def test_what_somebody_else_has_frozen_stays_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with seldom():
        pass
    assert 0 < frozen <= gc.get_freeze_count() + 10


@pytest.mark.parametrize("threshold", [0, 10 * ALLOCATIONS])
def test_a_collector_that_looks_more_seldom_still_does(threshold: int) -> None:
    gc.set_threshold(threshold)
    with seldom():
        assert gc.get_threshold()[0] == threshold
