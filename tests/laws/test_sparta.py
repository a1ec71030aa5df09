"""Sparse parameter averaging against plain numpy: what is chosen, how often, and what an average keeps."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from flockstep import registry
from flockstep.strategies.base import Strategy
from flockstep.strategies.selectors.base import Selector
from flockstep.strategies.sparta import Sparta
from flockstep.testing.strategies import check_strategy, equal_bits, run_strategy, small_job
from support.averaging import local_steps, ring_mean

SELECTORS = registry.names("selector")
SIZE = 18


def pick(name, turn, p, size=SIZE):
    """The parameters that are averaged after the given turn, written out."""
    parts = math.ceil(1 / p)
    key = {"random": (0, turn), "shuffled": 0, "partitioned": (0, turn // parts)}[name]
    random = np.random.default_rng(key)
    if name == "random":
        return np.array([i for i, u in enumerate(random.random(size)) if u < p], int)
    return np.sort(np.array_split(random.permutation(size), parts)[turn % parts])


def oracle(n, steps, name, p, job=None, period=None):
    """n models that step on their own, and share what `pick` says; all of it every `period` steps."""

    def meet(step, w):
        chosen = pick(name, step - 1, p)
        mean = ring_mean([replica[chosen] for replica in w])
        for replica in w:
            replica[chosen] = mean
        if period and step % period == 0:
            whole = ring_mean(w)
            for replica in w:
                replica[:] = whole

    return np.stack(local_steps(n, steps, meet, job))


@pytest.mark.oracle("strategy:sparta")
@pytest.mark.oracle("selector:random")
@pytest.mark.oracle("selector:shuffled")
@pytest.mark.oracle("selector:partitioned")
@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize(("n", "p"), [(2, 0.2), (3, 0.3), (4, 1.0), (1, 0.2)])
def test_equals_the_oracle_in_every_bit(n, p, name):
    job = small_job("adamw(lr=0.02)")
    run = run_strategy(f"sparta({p}, {name})", n, 15, job=job)
    assert equal_bits(run.replicas, oracle(n, 15, name, p, job))


def test_inside_local_sgd_equals_the_oracle_in_every_bit():
    run = run_strategy("sparta(0.2, full=local_sgd(4))", 3, 18)
    assert equal_bits(run.replicas, oracle(3, 18, "random", 0.2, period=4))


def test_inside_diloco_the_outer_steps_are_diloco_s():
    """With next to nothing averaged in between, it is DiLoCo; with more, it is not."""
    diloco = run_strategy("local_sgd(5, outer_optimizer=nesterov)", 3).replicas
    assert equal_bits(run_strategy("sparta(1e-9, full=local_sgd(5, outer_optimizer=nesterov))", 3).replicas, diloco)
    more = run_strategy("sparta(0.3, full=local_sgd(5, outer_optimizer=nesterov))", 3).replicas
    assert equal_bits(*more)
    assert np.abs(more - diloco).max() > 1e-4
    published = Strategy.parse("sparta(full=diloco)")
    assert (published.p, published.full.period) == (0.005, 500)


@pytest.mark.parametrize("name", ["shuffled", "partitioned"])
@pytest.mark.parametrize("p", [0.005, 0.1, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("size", [18, 1000, 3])
def test_every_parameter_has_its_turn_once_in_a_pass(size, p, name):
    turns = min(size, math.ceil(1 / p))
    selector = registry.load("selector", name)()
    for seed in (0, 3):
        for start in (0, turns, 7 * turns):
            seen = Counter(i for t in range(start, start + turns) for i in selector.pick(size, p, seed, t).tolist())
            assert seen == dict.fromkeys(range(size), 1)


@pytest.mark.parametrize("n", [2, 4])
def test_bytes_are_those_of_what_is_chosen(n):
    run = run_strategy("sparta(0.1, shuffled)", n, 20)
    assert sum(totals.sent_bytes for totals in run.totals.values()) == 20 // 10 * 2 * (n - 1) * SIZE * 4
    run = run_strategy("sparta(0.1, random)", n, 20)
    chosen = sum(len(pick("random", turn, 0.1)) for turn in range(20))
    assert sum(totals.sent_bytes for totals in run.totals.values()) == 2 * (n - 1) * chosen * 4


@pytest.mark.parametrize("text", ["sparta(0.2, shuffled)", "sparta(0.2, partitioned, local_sgd(5))"])
def test_conforms(text):
    check_strategy(Strategy.parse(text))


@dataclass(frozen=True)
class Stuck(Selector):
    """Wrong selector: always selects the same parameters."""

    def pick(self, size, share, seed, turn):
        return np.arange(max(1, int(share * size)))


@dataclass(frozen=True)
class Overlapping(Selector):
    """Wrong selector: selects some parameters twice in a pass."""

    def pick(self, size, share, seed, turn):
        return np.arange(size)[turn % math.ceil(1 / share) :]


@pytest.mark.negative_control("strategy:sparta")
@pytest.mark.negative_control("selector:random")
@pytest.mark.negative_control("selector:shuffled")
@pytest.mark.negative_control("selector:partitioned")
@pytest.mark.parametrize("selector", [Stuck(), Overlapping()])
def test_another_selection_shows(selector):
    replicas = run_strategy(Sparta(0.2, selector), 3, 15).replicas
    assert all(np.abs(replicas - oracle(3, 15, name, 0.2)).max() > 1e-3 for name in SELECTORS)
    seen = Counter(i for t in range(5) for i in selector.pick(SIZE, 0.2, 0, t).tolist())
    assert seen != dict.fromkeys(range(SIZE), 1)
