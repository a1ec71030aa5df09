"""Laws that costs are made of: order statistics, staleness, links, queues, and their published values."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from flockstep.collectives.costs import Link
from flockstep.costs import order_statistics, staleness
from flockstep.costs.links import LogGP, of_link, stream
from flockstep.costs.queues import waiting
from flockstep.costs.steps import Setting, step_cost
from flockstep.errors import ConfigurationError
from flockstep.simulation.compute import ComputeModel
from flockstep.strategies.base import Strategy


def test_golden_values_of_order_statistics() -> None:
    """Synchronous over asynchronous P H_P (A10); backup workers (A11)."""
    law = ComputeModel.parse("exponential(1)")
    ratios = [p * order_statistics.slowest(law, p) for p in (2, 4, 8, 16, 32)]
    assert ratios == pytest.approx([3, 25 / 3, 21.742857, 54.091664, 129.871837], rel=1e-6)
    backed = {(16, 0): 3.3807, (16, 1): 2.4396, (16, 2): 1.9951, (100, 0): 5.1874, (96, 4): 3.1040}
    for (n, b), seconds in backed.items():
        assert order_statistics.fastest(law, n, n + b) == pytest.approx(seconds, abs=6e-5)
    whole = [step_cost(Strategy.parse("ps(bsp)"), free(p)).seconds * p for p in (2, 4, 8)]
    assert whole == pytest.approx(ratios[:3], rel=1e-9)


def test_without_servers_nothing_goes_to_any() -> None:
    found = step_cost(Strategy.parse("dpsgd"), free(4))
    assert (found.server_sent, found.server_received) == (0, 0)


def free(workers: int) -> Setting:
    """Messages that take no time."""
    return Setting(workers, 4, ComputeModel.parse("exponential(1)"), 0.0, math.inf)


@pytest.mark.parametrize(
    ("text", "k", "steps"),
    [
        ("normal(1,cv=0.3)", 8, 1),
        ("normal(1,cv=1)", 3, 1),
        ("lognormal(1,0.5)", 8, 1),
        ("lognormal(1,0.5)", 8, 5),
        ("pareto(1,2.5)", 6, 1),
        ("exponential(1)", 8, 10),
        ("empirical((0.5,1,3))", 7, 1),
        ("speeds(exponential(1),(1,2))", 8, 1),
        ("speeds(constant(1),(1,2,4))", 5, 1),
        ("slow_spells(constant(1),0.1,4,1)", 8, 1),
        ("shared_cores(constant(1),3)", 7, 2),
        ("shared_cores(exponential(1),2)", 8, 1),
    ],
)
def test_order_statistics_of_every_law(text: str, k: int, steps: int) -> None:
    law, workers, rounds = ComputeModel.parse(text), 8, 3000
    draws = []
    clock = law.start(workers, 1)
    now = 0.0
    for _ in range(rounds):
        done = [now] * workers
        for _ in range(steps):
            for rank in sorted(range(workers), key=done.__getitem__):
                done[rank] = clock.finish(rank, done[rank])
        draws.append(sorted(done)[k - 1] - now)
        now = max(done)
    error = 4 * float(np.std(draws)) / math.sqrt(rounds)
    assert order_statistics.fastest(law, k, workers, steps) == pytest.approx(np.mean(draws), abs=error + 1e-9)


def test_quadrature_agrees_with_what_is_exact() -> None:
    for text in ("exponential(1)", "pareto(1,2.5)", "constant(2)"):
        law = ComputeModel.parse(text)
        mixed = ComputeModel.parse(f"speeds({text},(1,1))")
        for k in (1, 5, 8):
            exact, numeric = (order_statistics.fastest(one, k, 8) for one in (law, mixed))
            assert numeric == pytest.approx(exact, rel=1e-4)
    assert order_statistics.at_least(ComputeModel.parse("exponential(1)"), 1.0) == pytest.approx(1 + math.exp(-1))
    assert order_statistics.memoryless(ComputeModel.parse("speeds(exponential(1),(1,3))"))
    with pytest.raises(ConfigurationError, match="1 <= k <= n"):
        order_statistics.fastest(ComputeModel.parse("constant(1)"), 3, 2)
    with pytest.raises(ConfigurationError, match="no closed form"):
        order_statistics.fastest(ComputeModel.parse("shared_cores(exponential(1),2)"), 3, 4)


def test_staleness_laws() -> None:
    assert staleness.mean_staleness(30) == 29
    assert staleness.mean_staleness(30, 30) == pytest.approx(29 / 30)
    chances = [staleness.geometric(8, t) for t in range(400)]
    assert sum(chances) == pytest.approx(1)
    assert sum(t * p for t, p in enumerate(chances)) == pytest.approx(staleness.mean_staleness(8))
    for probability in (0.0, 0.3, 0.5, 0.99):
        t = staleness.geometric_quantile(8, probability)
        assert sum(chances[: t + 1]) >= probability > (sum(chances[:t]) if t else -1)
    assert staleness.staleness_of_fast([0.25] * 4, 0) == pytest.approx(3)
    assert staleness.ssp_bound(8, 0) == staleness.bounded_delay_bound(8, 0) == 0
    with pytest.raises(ConfigurationError, match=">= 1 workers"):
        staleness.mean_staleness(0)


def test_log_gp() -> None:
    link = LogGP(latency=5e-6, overhead=2e-6, gap=4e-6, per_byte=1e-9)
    assert link.message(1) == pytest.approx(9e-6)  # o + L + o
    assert link.message(1001) == pytest.approx(10e-6)
    assert link.stream(3, 1001) == pytest.approx(10e-6 + 2 * (1e-6 + 4e-6))
    assert link.stream(0, 1001) == 0
    plain = Link(1e-3, 1e-7, 64)
    assert of_link(plain).message(1000) == pytest.approx(plain.message(1000))
    assert of_link(plain).stream(5, 1000) == pytest.approx(stream(plain, 5, 1000))
    assert link.link().message(1000) == pytest.approx(link.message(1000))
    with pytest.raises(ConfigurationError, match="gap"):
        LogGP(1.0, 1.0, -1.0, 1.0)


def test_the_queue_is_bounded_by_what_it_can_serve() -> None:
    for workers in (1, 2, 8, 64):
        wait = waiting(workers, 1.0, 0.1)
        assert workers / (1.1 + wait) <= 10 * (1 + 1e-12)
        assert wait >= 0
    assert waiting(1, 1.0, 0.1) == 0


SPELLS = "slow_spells(constant(0.1), probability=0.01, factor=5, length=10)"


def drawn(law: ComputeModel, workers: int, steps: int) -> float:
    """Mean of the slowest of some workers after so many gradients, by drawing; spells have begun by then."""
    times, rounds = [], 80_000 // steps
    for rank in range(workers):
        stream = law.stream(1, rank)
        row = np.fromiter(itertools.islice(stream, steps * (rounds + 20)), float)[20 * steps :]
        times.append(row.reshape(rounds, steps).sum(1))
    return float(np.max(times, axis=0).mean())


@pytest.mark.parametrize(("workers", "steps"), [(8, 10), (16, 32), (3, 2)])
@pytest.mark.parametrize("text", [SPELLS, SPELLS.replace("constant(0.1)", "lognormal(0.1, sigma=0.5)")])
def test_sums_know_that_slow_spells_last(text: str, workers: int, steps: int) -> None:
    law = ComputeModel.parse(text)
    assert order_statistics.slowest(law, workers, steps) == pytest.approx(drawn(law, workers, steps), rel=0.05)


def test_spells_of_one_gradient_are_another_law() -> None:
    """The negative control: as many slow gradients, each by itself."""
    apart = ComputeModel.parse("slow_spells(constant(0.1), probability=0.0917, factor=5, length=1)")
    lasting = ComputeModel.parse(SPELLS)
    assert order_statistics.mean(apart) == pytest.approx(order_statistics.mean(lasting), rel=0.03)
    assert order_statistics.slowest(apart, 8, 10) < 0.75 * order_statistics.slowest(lasting, 8, 10)


def test_heavy_tails_of_sums_are_not_cut_off() -> None:
    law = ComputeModel.parse("lognormal(0.1, sigma=1.5)")
    assert order_statistics.slowest(law, 16, 32) == pytest.approx(drawn(law, 16, 32), rel=0.04)


def test_crowded_machines_of_one_speed_have_a_form() -> None:
    law = ComputeModel.parse("shared_cores(speeds(lognormal(0.1, sigma=0.2), (0.5,)), cores=2)")
    plain = ComputeModel.parse("shared_cores(lognormal(0.1, sigma=0.2), cores=2)")
    assert order_statistics.slowest(law, 8) == pytest.approx(order_statistics.slowest(plain, 8) / 2, rel=1e-3)
