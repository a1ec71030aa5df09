import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flockstep.errors import ConfigurationError
from flockstep.simulation.compute import (
    Clock,
    ComputeModel,
    ConstantTime,
    Exponential,
    Lognormal,
    Normal,
    Pareto,
    SharedCores,
    SlowSpells,
    Speeds,
)

RANDOM: list[ComputeModel] = [Normal(0.05, cv=0.2), Exponential(0.05), Lognormal(0.05, 0.5), Pareto(0.05, 6.0)]
ALL: list[ComputeModel] = [
    ConstantTime(0.05),
    *RANDOM,
    Speeds(Exponential(0.05), (1.0, 3.0)),
    SlowSpells(Exponential(0.05), 0.1, 10.0, 3),
]


def finish(clock: Clock, rank: int, t: float, stretch: float = 1.0) -> float:
    """Begin a gradient and return the time at which it ends if no other begins later."""
    clock.begin(rank, t, stretch)
    return clock.due(rank, t)


def draws(model: ComputeModel, count: int, seed: int = 7, rank: int = 0, workers: int = 1) -> np.ndarray:
    clock = model.start(max(workers, rank + 1), seed)
    return np.array([finish(clock, rank, 0.0) for _ in range(count)])


@pytest.mark.parametrize("model", RANDOM, ids=str)
def test_means_are_within_four_standard_errors(model: ComputeModel) -> None:
    values = draws(model, 40_000)
    error = values.std() / math.sqrt(len(values))
    assert abs(values.mean() - 0.05) < 4 * error
    assert abs(values.mean() - 0.05 * 1.1) > 4 * error  # the check can fail
    assert values.min() > 0


def test_lognormal_mean_is_not_its_median() -> None:
    values = draws(Lognormal(0.05, 1.0), 40_000)
    assert np.median(values) == pytest.approx(0.05 * math.exp(-0.5), rel=0.03)
    assert np.log(values).std() == pytest.approx(1.0, rel=0.02)


def test_truncated_normal_redraws_what_is_not_above_zero() -> None:
    values = draws(Normal(1.0, cv=1.0), 40_000)
    density, above = math.exp(-0.5) / math.sqrt(2 * math.pi), 0.5 * math.erfc(-1 / math.sqrt(2))
    expected = 1.0 + density / above
    assert values.min() > 0
    assert abs(values.mean() - expected) < 4 * values.std() / math.sqrt(len(values))
    assert expected == pytest.approx(1.29, abs=0.005)


def test_pareto_has_the_tail_of_its_shape() -> None:
    count, shape = 40_000, 1.5
    values = draws(Pareto(0.05, shape), count)
    least = 0.05 * (shape - 1) / shape
    for times in (3.0, 10.0, 30.0):
        expected = times**-shape
        error = math.sqrt(expected * (1 - expected) / count)
        assert abs((values > times * least).mean() - expected) < 4 * error
    assert values.min() >= least
    assert (draws(Exponential(0.05), count) > 1.0).sum() == 0 < (values > 1.0).sum()


@pytest.mark.parametrize("model", ALL, ids=str)
@given(calls=st.lists(st.integers(0, 3), max_size=60), seed=st.integers(0, 2**40))
@settings(max_examples=15, deadline=None)
def test_draws_do_not_depend_on_the_order_of_calls(model: ComputeModel, calls: list[int], seed: int) -> None:
    clock = model.start(4, seed)
    seen: dict[int, list[float]] = {}
    for rank in calls:
        seen.setdefault(rank, []).append(finish(clock, rank, 0.0))
    for rank, values in seen.items():
        assert values == draws(model, len(values), seed, rank, workers=9).tolist()


@pytest.mark.parametrize("model", RANDOM, ids=str)
def test_ranks_and_seeds_draw_differently(model: ComputeModel) -> None:
    first = draws(model, 600)
    assert (first == draws(model, 600)).all()
    assert len(np.unique(first)) == 600  # also across the ends of blocks
    for other in (draws(model, 600, rank=1), draws(model, 600, seed=8)):
        assert (first != other).all()
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.2


def test_speeds_cycle_and_keep_the_draws() -> None:
    model = Speeds(Exponential(0.05), (1, 2.5))
    for rank, factor in enumerate((1, 2.5, 1, 2.5)):
        assert (draws(model, 300, rank=rank) == factor * draws(Exponential(0.05), 300, rank=rank)).all()
    assert draws(Speeds(ConstantTime(1), (2,)), 3).tolist() == [2, 2, 2]


def test_slow_spells_have_their_length_and_share() -> None:
    probability, length, count = 0.02, 5, 40_000
    model = SlowSpells(ConstantTime(1.0), probability, 10.0, length)
    values = draws(model, count)
    assert set(values.tolist()) == {1.0, 10.0}
    runs = [(slow, len(list(group))) for slow, group in itertools.groupby(values[:-length] == 10.0)]
    assert all(steps % length == 0 for slow, steps in runs[:-1] if slow)
    assert any(steps % length for slow, steps in runs if not slow)
    share = probability * length / (probability * length + 1 - probability)
    # of n steps about n p / (1 - p + p L) begin a spell of L slow steps each
    error = length * math.sqrt(probability / count)
    assert abs((values == 10.0).mean() - share) < 4 * error
    assert not (draws(model, 500, rank=1) == draws(model, 500)).all()


def test_workers_that_share_cores_at_every_moment_slow_each_other_down() -> None:
    clock = Speeds(SharedCores(ConstantTime(1.0), 2, turns=True), (1.0,)).start(5, 0)
    assert finish(clock, 0, 0.0) == 1.0
    clock.begin(1, 0.5)
    assert [clock.due(rank, 0.5) for rank in (0, 1)] == pytest.approx([1.0, 1.5])  # a core for each
    clock.begin(2, 0.75)  # on the core of worker 0, which has .25 left
    assert [clock.due(rank, 0.75) for rank in (0, 1, 2)] == pytest.approx([1.25, 1.5, 2.0])
    assert clock.due(0, 1.25) == 1.25
    assert clock.due(2, 1.3, share=0.5) == pytest.approx(1.25 + 2 / 3 - 1 / 4)
    clock.drop(1, 1.3)
    assert clock.due(2, 1.3) == pytest.approx(2.0)  # a gradient has one core at the most


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 200), st.integers(1, 30)), min_size=1, max_size=12),
    st.integers(1, 4),
)
@settings(deadline=None)
def test_shared_cores_agree_with_exact_fractions(calls: list[tuple[int, int, int]], cores: int) -> None:
    """Beside cores whose gradients advance in exact fractions of a millisecond."""
    left, ends = [Fraction(0)] * 5, dict[int, Fraction]()
    place = [rank % cores for rank in range(5)]
    clock, now, before = SharedCores(ConstantTime(0.01), cores, turns=True).start(5, 0), 0, Fraction(0)

    def on(core: int) -> list[int]:
        return [rank for rank in range(5) if left[rank] and place[rank] == core]

    def advance(until: Fraction | None) -> None:
        nonlocal before
        while any(left) and (until is None or before < until):
            paces = {rank: Fraction(1, len(on(core))) for core in range(cores) for rank in on(core)}
            passed = min(left[rank] / pace for rank, pace in paces.items())
            passed = passed if until is None else min(passed, until - before)
            before += passed
            for rank, pace in paces.items():
                left[rank] -= passed * pace
                if not left[rank]:
                    ends[rank] = before
        before = before if until is None else until

    begun = set[int]()
    for rank, pause, stretch in calls:
        now += pause
        advance(Fraction(now))
        if left[rank]:
            continue
        if rank in begun:
            assert clock.due(rank, now / 1000) <= now / 1000
        clock.begin(rank, now / 1000, stretch)
        begun.add(rank)
        sizes = [len(on(core)) for core in range(cores)]
        if sizes[place[rank]] > min(sizes):
            place[rank] = sizes.index(min(sizes))
        left[rank] = Fraction(10 * stretch)
    found = {rank: clock.due(rank, now / 1000) for rank in begun if left[rank]}
    advance(None)
    assert found == {rank: pytest.approx(float(ends[rank]) / 1000) for rank in found}


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0, 0.2)), max_size=60), st.integers(1, 3))
@settings(deadline=None)
def test_a_core_never_serves_two_at_once(calls: list[tuple[int, float]], cores: int) -> None:
    base = Exponential(0.1)
    clock, durations = SharedCores(base, cores).start(5, 3), [base.stream(3, rank) for rank in range(5)]
    free, now = [0.0] * cores, 0.0
    for rank, pause in calls:
        now += pause
        done, duration = finish(clock, rank, now), next(durations[rank])
        assert done == max(now, free[rank % cores]) + duration
        free[rank % cores] = done


def test_a_longer_gradient_holds_its_core_for_longer() -> None:
    clock = SharedCores(ConstantTime(1.0), 1).start(2, 0)
    assert [finish(clock, 0, 0.0), finish(clock, 1, 0.0, 3.0), finish(clock, 0, 1.0)] == [1.0, 4.0, 5.0]
    assert finish(ConstantTime(1.0).start(1, 0), 0, 2.0, 3.0) == 5.0


@pytest.mark.parametrize(("workers", "seed", "name"), [(0, 0, "workers"), (1, -1, "seed")])
def test_impossible_runs_are_refused(workers: int, seed: int, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} must be >="):
        ConstantTime(1.0).start(workers, seed)


def shared(cores: int, *times: float) -> Clock:
    """Workers that share cores by turns, whose gradients take these seconds on a core."""
    return SharedCores(ConstantTime(1.0), cores, turns=True).clock([itertools.repeat(one) for one in times])


def test_messages_take_their_core_from_the_gradients() -> None:
    clock = shared(1, 1.0)
    clock.begin(0, 0.0)
    assert clock.handle(0.2, 0.3) == pytest.approx(0.5)
    assert clock.due(0, 0.1) == pytest.approx(1.3)
    assert clock.due(0, 0.4) == pytest.approx(1.3)
    assert clock.handle(0.6, 0.1) == pytest.approx(0.7)
    assert clock.due(0, 0.6) == pytest.approx(1.4)
    assert clock.due(0, 1.4) <= 1.4


def test_a_message_on_a_core_that_is_free_delays_nothing() -> None:
    clock = shared(2, 1.0, 1.0)
    clock.begin(0, 0.0)
    assert clock.handle(0.0, 0.4) == 0.4
    assert clock.due(0, 0.0) == pytest.approx(1.0)
    clock.begin(1, 0.0)
    assert [clock.due(rank, 0.0) for rank in (0, 1)] == pytest.approx([1.0, 1.4]), "worker 1 has the message's core"


def test_no_more_messages_than_cores_are_handled_at_a_time() -> None:
    clock = shared(2, 1.0)
    assert [clock.handle(t, 0.5) for t in (0.0, 0.1, 0.2, 0.0)] == pytest.approx([0.5, 0.6, 1.0, 1.1])
    assert [shared(2, 1.0).handle(3.0, 0.5), clock.handle(3.0, 0.5)] == [3.5, 3.5]


def test_cores_of_their_own_handle_messages_beside_gradients() -> None:
    clock = ConstantTime(1.0).start(2, 0)
    clock.begin(0, 0.0)
    assert clock.handle(0.0, 0.5) == 0.5
    assert clock.due(0, 0.0) == 1.0


@pytest.mark.parametrize("seed", range(3))
def test_gradients_share_the_cores_that_handle_no_message(seed: int) -> None:
    """An oracle in steps of 0.2 ms."""
    random, step = np.random.default_rng(seed), 2e-4
    times = random.uniform(0.2, 1.0, 4).tolist()
    clock = shared(2, *times)
    for rank in range(4):
        clock.begin(rank, 0.0)
    messages = [(begin, seconds / 3) for begin, seconds in random.uniform(0, 1, (6, 2)).tolist()]
    handled = [(end - seconds, end) for t, seconds in messages for end in [clock.handle(t, seconds)]]
    taken: tuple[list[tuple[float, float]], ...] = ([], [])
    for begin, end in handled:
        free = [all(end <= first + 1e-9 or last <= begin + 1e-9 for first, last in core) for core in taken]
        taken[free.index(True)].append((begin, end))
    left, ends, now = dict(enumerate(times)), dict[int, float](), 0.0
    while left:
        for core in range(2):
            running = [rank for rank in left if rank % 2 == core]
            if not any(begin <= now < end for begin, end in taken[core]):
                left |= {rank: left[rank] - step / len(running) for rank in running}
        now += step
        ends |= {rank: now for rank, one in left.items() if one <= 0}
        left = {rank: one for rank, one in left.items() if one > 0}
    assert [clock.due(rank, 0.0) for rank in range(4)] == pytest.approx([ends[rank] for rank in range(4)], abs=4e-3)
    assert [clock.due(rank, 0.1) for rank in range(4)] == pytest.approx([ends[rank] for rank in range(4)], abs=4e-3)
