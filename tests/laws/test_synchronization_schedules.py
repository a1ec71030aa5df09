"""Periods: after which steps replicas meet, against a table; what post-local SGD saves; AdaComm's rule."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from flockstep.expression import from_data, to_data
from flockstep.records.events import UpdateEvent
from flockstep.strategies.base import Strategy
from flockstep.strategies.local_sgd import LocalSGD
from flockstep.strategies.synchronization_schedules.adaptive import Adaptive
from flockstep.strategies.synchronization_schedules.fixed import Fixed
from flockstep.strategies.synchronization_schedules.post_local import PostLocal
from flockstep.strategies.synchronization_schedules.scheduled import Scheduled
from flockstep.testing.strategies import check_strategy, equal_bits, run_strategy
from support.averaging import local_steps, ring_mean

N, STEPS = 3, 30


def meetings(period, n=N, steps=STEPS, **settings):
    """The run, and after which steps its replicas met, as the record has it."""
    run = run_strategy(LocalSGD(period), n, steps, **settings)
    counts = [event.count for event in run.of(UpdateEvent) if event.node == 0]
    return run, np.cumsum(counts).tolist()


def oracle(steps):
    """The replicas after averages at exactly the given steps."""

    def meet(step, w):
        if step in steps:
            mean = ring_mean(w)
            for replica in w:
                replica[:] = mean

    return np.stack(local_steps(N, STEPS, meet))


@pytest.mark.oracle("synchronization_schedule:fixed")
@pytest.mark.parametrize("period", [1, 7, 30, 31])
def test_fixed_equals_the_oracle_in_every_bit(period):
    run, met = meetings(Fixed(period))
    assert met == [*range(period, STEPS + 1, period)]
    assert equal_bits(run.replicas, oracle(met), run_strategy(f"local_sgd({period})", N, STEPS).replicas)


@pytest.mark.oracle("synchronization_schedule:post_local")
@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (0, [8, 16, 24]),
        (1, [1, 9, 17, 25]),
        (10, [*range(1, 11), 18, 26]),
        (29, [*range(1, 30)]),
        (math.inf, [*range(1, 31)]),
    ],
)
def test_post_local_equals_the_oracle_in_every_bit(start, expected):
    run, met = meetings(PostLocal(start, 8))
    assert met == expected
    assert equal_bits(run.replicas, oracle(expected))


def test_post_local_starts_at_the_first_decay():
    """Half-way, here, and not at the end of the warm-up before it."""
    _, met = meetings(PostLocal(period=5), steps=40, schedule="goyal(warmup=1, at=(0.5,))")
    assert met == [*range(1, 21), 25, 30, 35, 40]
    _, met = meetings(PostLocal(period=5), steps=40)
    assert met == [*range(1, 41)], "no decay, no second phase"


@pytest.mark.oracle("synchronization_schedule:scheduled")
def test_scheduled_equals_the_oracle_in_every_bit():
    run, met = meetings(Scheduled((2, 5, 1), (0, 6, 24)))
    assert met == [2, 4, 6, 11, 16, 21, 25, 26, 27, 28, 29, 30]
    assert equal_bits(run.replicas, oracle(met))


@pytest.mark.oracle("synchronization_schedule:adaptive")
def test_adaptive_follows_the_loss():
    """Recomputed from the losses of the replicas at each local step, on the batches they used."""
    run, met = meetings(Adaptive(8, block=16, decay=0.5), steps=120)
    seen = []

    class Listens(Adaptive):
        def due(self, me, state, since):
            seen.append((me.step, me.loss))
            return super().due(me, state, since)

    again, _ = meetings(Listens(8, block=16, decay=0.5), steps=120)
    assert equal_bits(run.replicas, again.replicas)
    loss = {step: np.mean([value for t, value in seen if t == step]) for step in range(1, 121)}
    expected, length, first, change = [0], 8, None, 16
    while expected[-1] + length <= 120:
        expected.append(expected[-1] + length)
        now = np.mean([loss[step] for step in range(expected[-2] + 1, expected[-1] + 1)])
        first = first or now
        if expected[-1] >= change:
            wanted = math.ceil(math.sqrt(now / first) * 8)
            length, change = (wanted if wanted < length else max(1, length // 2)), expected[-1] + 16
    assert met == expected[1:]
    assert len(set(np.diff(expected))) > 2, "the period should have changed"


@pytest.mark.parametrize(
    ("ratio", "length", "expected"),
    [(1.0, 16, 8), (0.25, 16, 8), (0.2, 16, 8), (0.01, 8, 2), (0.01, 2, 1), (2.0, 1, 1), (math.nan, 4, 2)],
)
def test_adaptive_rule(ratio, length, expected):
    assert Adaptive(first=16).chosen(ratio, length) == expected


@pytest.mark.parametrize(
    ("ratio", "length", "expected"), [(1.0, 4, 16), (10.0, 4, 16), (0.25, 4, 8), (0.01, 4, 2), (math.nan, 4, 4)]
)
def test_adaptive_rule_where_the_rate_has_changed(ratio, length, expected):
    """The formula as it stands, up to the first period; a period that is not shorter is not shortened for that."""
    assert Adaptive(first=16).chosen(ratio, length, same_rate=False) == expected


@pytest.mark.oracle("synchronization_schedule:adaptive")
def test_a_warm_up_does_not_shorten_periods():
    """eta_0 is the rate before it decays: with the first rate of a warm-up H would be 2 of 8 ever after."""
    me, period = SimpleNamespace(params=np.zeros(1), lr=0.01, loss=1.0, step=0), Adaptive(8, block=8)

    class Alone:
        async def average(self, me, array):
            pass

    state, lengths = period.start(me), []
    for rate in (0.01, 0.05, 0.1, 0.16, 0.04):
        me.lr, me.step = rate, me.step + 8
        period.due(me, state, 8)
        with pytest.raises(StopIteration, match=r"^$"):
            period.met(me, state, Alone()).send(None)
        lengths.append(state.length)
    assert lengths[1:] == [8, 8, 8, 8], "the same loss, and never less than the largest rate allows"


def test_adaptive_follows_the_learning_rate():
    """Wang & Joshi 2019, the rule with variable rates: H = ceil(sqrt(eta_0 / eta · F / F_0) first)."""
    schedule, steps, lengths = "step_decay(at=(0.4,), decay=0.25)", 120, []

    class Listens(Adaptive):
        async def met(self, me, state, collective):
            mean = state.total / state.count
            await super().met(me, state, collective)
            if me.rank == 0:
                lengths.append((me.step, me.lr, mean, state.first, state.length))

    run = run_strategy(LocalSGD(Listens(8, block=8)), 1, steps, schedule=schedule)
    assert run.replicas.shape == (1, 18)
    length, rate, change = 8, 0.1, 8
    for step, lr, now, first, chosen in lengths:
        if step >= change:
            wanted = math.ceil(math.sqrt(0.1 / lr * now / first) * 8)
            length = min(wanted, 8) if wanted < length or lr != rate else max(1, length // 2)
            rate, change = lr, step + 8
        assert chosen == length
    periods = [chosen for *_, chosen in lengths]
    at = next(index for index, (_, lr, *_) in enumerate(lengths) if lr < 0.1)
    assert max(periods[at:]) > periods[at - 1], "a quarter of the rate allows for a longer period"


@pytest.mark.parametrize(
    ("text", "sync"),
    [
        ("1", True),
        ("2", False),
        ("fixed(1)", True),
        ("post_local(inf)", True),
        ("post_local(10)", False),
        ("scheduled((1, 1), (0, 5))", True),
        ("scheduled", False),
        ("adaptive(1)", True),
        ("adaptive", False),
    ],
)
def test_only_a_period_of_one_is_synchronous(text, sync):
    assert (Strategy.parse(f"local_sgd({text})").traits.delivery == "synchronous") == sync


@pytest.mark.parametrize("period", ["post_local(10, 5)", "scheduled((1, 5), (0, 10))", "adaptive(2, 10)"])
def test_conforms(period):
    check_strategy(Strategy.parse(f"local_sgd({period})"))


class OneLate(Fixed):
    """Wrong schedule: averages one step late."""

    def due(self, me, state, since):
        return since > self.period


@pytest.mark.negative_control("synchronization_schedule:fixed")
def test_a_late_meeting_shows():
    run, met = meetings(OneLate(7))
    assert met == [8, 16, 24]
    assert not equal_bits(run.replicas, oracle([7, 14, 21, 28]))


class CountsFromZero(PostLocal):
    """Meets at multiples of H, also in the second phase."""

    def due(self, me, state, since):
        return me.step % self.period == 0 if me.step > self.start_at else True


@pytest.mark.negative_control("synchronization_schedule:post_local")
def test_a_second_phase_at_multiples_shows():
    run, met = meetings(CountsFromZero(10, 8))
    assert met == [*range(1, 11), 16, 24]
    assert not equal_bits(run.replicas, oracle([*range(1, 11), 18, 26]))


class StaysAtTheFirst(Scheduled):
    """Wrong schedule: never changes its period."""

    def due(self, me, state, since):
        return since >= self.periods[0]


@pytest.mark.negative_control("synchronization_schedule:scheduled")
def test_a_table_that_is_not_read_shows():
    run, met = meetings(StaysAtTheFirst((2, 5, 1), (0, 6, 24)))
    assert met == [*range(2, 31, 2)]
    assert not equal_bits(run.replicas, oracle([2, 4, 6, 11, 16, 21, 25, 26, 27, 28, 29, 30]))


class StaysAtFirst(Adaptive):
    """Wrong schedule: ignores the loss."""

    def chosen(self, ratio, length, same_rate=True):
        return length


@pytest.mark.negative_control("synchronization_schedule:adaptive")
def test_a_period_that_does_not_adapt_shows():
    expected, met = (meetings(kind(8, block=16, decay=0.5), steps=120)[1] for kind in (Adaptive, StaysAtFirst))
    assert met == [*range(8, 121, 8)] != expected


@pytest.mark.parametrize("period", [3, Fixed(3), PostLocal(4, 3), Adaptive(3)])
def test_a_period_is_read_back_as_it_was(period):
    strategy = LocalSGD(period)
    assert Strategy.parse(str(strategy)) == strategy
    assert from_data(to_data(strategy), Strategy) == strategy
