"""Python's garbage collector during a simulation: no setting is left changed, and ended simulations are freed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

import flockstep
from flockstep.errors import RunError
from flockstep.runtime.virtual import Simulation
from flockstep.simulation.collector import ALLOCATIONS, PASSES, seldom
from flockstep.testing.strategies import Watched, run_strategy


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """As in a fresh process, and put back."""
    threshold = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*threshold)
    gc.enable()


def test_within_a_simulation_the_collector_looks_seldom() -> None:
    seen = []

    class Looks(Watched):
        def send(self, to, message):
            seen.append(gc.get_threshold())
            super().send(to, message)

    run_strategy("all_reduce", 2, 3, simulation=Looks)
    assert set(seen) == {(ALLOCATIONS, PASSES, PASSES)}
    assert gc.get_threshold() == (700, 10, 10)


def test_an_error_leaves_nothing_behind() -> None:
    with pytest.raises(RunError, match="as meant"), seldom(), seldom():
        raise RunError("as meant")
    assert gc.get_threshold() == (700, 10, 10)


def test_blocks_that_overlap_in_threads_leave_nothing_behind() -> None:
    with ExitStack() as one, ExitStack() as other:
        one.enter_context(seldom())
        other.enter_context(seldom())
        one.close()
        assert gc.get_threshold()[0] == ALLOCATIONS
    assert gc.get_threshold() == (700, 10, 10)


def test_a_simulation_is_freed_when_it_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its nodes refer to each other, and the collector would find them late."""
    begun: list[weakref.ref[object]] = []

    class Noted(Simulation):
        def run(self, restarts: Sequence[float] = ()) -> None:
            begun.extend(map(weakref.ref, [self, *(runner.node for runner in self.runners.values())]))
            super().run(restarts)

    monkeypatch.setattr("flockstep.launchers.simulate.Simulation", Noted)
    gc.disable()
    flockstep.simulate("quadratic", "ps(bsp)", workers=3, steps=2, out=tmp_path / "run")
    assert [one() for one in begun] == [None] * 5


def test_a_collector_that_looks_more_seldom_still_does() -> None:
    gc.set_threshold(10 * ALLOCATIONS)
    with seldom():
        assert gc.get_threshold()[0] == 10 * ALLOCATIONS


def test_a_collector_that_is_off_stays_off() -> None:
    gc.set_threshold(0)
    gc.disable()
    with seldom():
        assert gc.get_threshold() == (0, 10, 10)
    assert not gc.isenabled()
