"""Rules exactly at their limits: the value of a bound, what is left at the end, sizes at both sides of a threshold with
the bytes that it counts, the share at which a sample aims, and draws of neighboring seeds.

Every test goes through the registry: a new component has to say where its limit is, or that it has none.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from flockstep import registry
from flockstep.arrays import kernels
from flockstep.codecs.base import Codec
from flockstep.collectives.sparse import SMALL, Sparse
from flockstep.collectives.streams import threshold
from flockstep.messages import Message
from flockstep.strategies.consistency.base import ClockRule, Consistency, ConsistencyView
from flockstep.strategies.consistency.stale_synchronous import StaleSynchronous
from flockstep.strategies.filters.base import Filter
from flockstep.strategies.server_state import Push, Read
from flockstep.topologies.random_regular import RandomRegularGraph

WORKERS = 4


def view(**given: Any) -> ConsistencyView:
    """A server of four workers that have pushed five gradients each, and whose parameters have not moved."""
    facts: dict[str, Any] = {"slowest": 5, "workers": WORKERS, "live": WORKERS, "lost": 0, "version": 1, "moved": True}
    at = {"reading": {0: 0}, "params": np.zeros(3), "kept": {0: np.zeros(3)}, "waiting": lambda rank: False}
    return ConsistencyView(**{**facts, **at, **given})


def read(clock: int = 5) -> Read:
    return Read(0, clock, 0, Message(0, "read"))


def pushes(count: int, timestamp: int = 5) -> list[Push]:
    return [Push(rank % WORKERS, timestamp, 1, 0.1, np.ones(3)) for rank in range(count)]


def of_clocks(rule: Consistency) -> None:
    assert isinstance(rule, ClockRule)
    last = 5 + int(rule.bound)
    assert rule.admitted([read(last)], view())
    assert not rule.admitted([read(last + 1)], view())
    if not rule.alone:  # then gradients wait for no clock
        assert rule.released(pushes(1, last - 1), view())
        assert not rule.released(pushes(1, last), view())


def of_values(rule: Consistency) -> None:
    delta = rule.delta  # type: ignore[attr-defined]
    for moved, admitted in ((np.nextafter(delta, 0), 1), (delta, 0), (np.nextafter(delta, 1), 0)):
        assert len(rule.admitted([read()], view(params=np.array([0.0, moved, 0.0])))) == admitted


def of_counts(rule: Consistency) -> None:
    needed = rule.full_step(WORKERS)
    assert needed > 1, "one gradient fewer must be possible"
    assert not rule.released(pushes(needed - 1), view())
    assert [len(group) for group in rule.released(pushes(needed), view())] == [needed]


BOUNDS: dict[str, Callable[[Consistency], None] | None] = {
    **dict.fromkeys(("bsp", "ssp(3)", "cached_ssp(3)", "essp(3)", "bounded_delay(4)"), of_clocks),
    "value_bound(0.1)": of_values,
    **dict.fromkeys(("backup(1)", "k_sync(2)", "k_batch_sync(2)", "k_async(2)", "k_batch_async(2)"), of_counts),
    "softsync(2)": of_counts,
    "asynchronous": None,
}
"""Consistency rule → what holds at its bound; None: no read and no gradient waits."""
THRESHOLDS: dict[str, tuple[float, bool] | None] = {
    "significantly_modified(0.25)": (0.25, False),
    "kkt(0.5, slack=0.25)": (0.25, False),
    **dict.fromkeys(("random_skip", "support", "key_caching")),
}
"""Filter → its threshold, and whether an entry exactly there is sent; None: the entry's magnitude does not count."""


@pytest.mark.parametrize("text", BOUNDS)
def test_a_consistency_rule_at_its_bound(text: str) -> None:
    check, rule = BOUNDS[text], Consistency.parse(text)  # type: ignore[type-abstract]
    if check is not None:
        check(rule)
    else:
        assert rule.admitted([read(10**6)], view())
        assert rule.released(pushes(1), view())


@pytest.mark.parametrize("text", THRESHOLDS)
def test_a_filter_at_its_threshold(text: str) -> None:
    if (limit := THRESHOLDS[text]) is None:
        return
    at, sent = limit
    update = np.array([np.nextafter(at, 0), at, np.nextafter(at, 1), -at])
    mask = Filter.parse(text).lets_through(update, np.zeros(4), np.random.default_rng(0))  # type: ignore[type-abstract]
    assert mask is not None
    assert mask.tolist() == [False, sent, True, sent]


@pytest.mark.parametrize(("noun", "table"), [("consistency", BOUNDS), ("filter", THRESHOLDS)])
def test_every_registered_rule_says_what_its_bound_is(noun: str, table: dict[str, Any]) -> None:
    assert {text.partition("(")[0] for text in table} == set(registry.names(noun))


@pytest.mark.parametrize("text", BOUNDS)
@pytest.mark.parametrize("rest", [1, 2, 3])
def test_gradients_that_are_left_at_the_end_make_one_step(text: str, rest: int) -> None:
    """A group of m gradients makes m/c of a step along their mean; rules that drop gradients, or apply each on arrival,
    leave nothing.
    """
    rule = Consistency.parse(text)  # type: ignore[type-abstract]
    collects = BOUNDS[text] is of_counts and rule.delivery == "unbounded delay"
    by_time = isinstance(rule, StaleSynchronous)
    left = pushes(rest)
    assert rule.flushed(left, view(live=0)) == ([left] if collects or by_time else [])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_sparse_collective_counts_indices_and_values_at_both_of_its_thresholds(dtype: str) -> None:
    width, size = np.dtype(dtype).itemsize, 1 << 22
    elements = SMALL // (4 + width)
    assert elements * (4 + width) <= SMALL < (elements + 1) * (4 + width)
    assert Sparse().choose(2, size, dtype, elements) == "ssar_doubling"
    assert Sparse().choose(2, size, dtype, elements + 1) == "ssar_split"
    full = int(threshold(size, width))
    assert full * (4 + width) <= size * width < (full + 1) * (4 + width), "a stream as large as the dense array"
    assert Sparse().choose(1, size, dtype, full) == "ssar_split"
    assert Sparse().choose(1, size, dtype, full + 1) == "dsar"


AIMS = {"topk(0.01, sampled=True)": 1.1, "dgc(0.01)": 1.1, "adaptive_threshold(0.01)": 1.0}
"""Codec that estimates a threshold from a sample → elements that should exceed the threshold, as a multiple of its
share: of 1.1 times the share rarely too few exceed it.
"""


@pytest.mark.parametrize("text", AIMS)
def test_a_sampled_threshold_aims_at_its_share(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size, draws, counts = 100_000, 100, list[int]()
    codec, random = Codec.parse(text), np.random.default_rng(5)  # type: ignore[type-abstract]
    array = random.standard_normal(size).astype(np.float32)
    on_numpy = kernels.of(array)
    above = on_numpy.above

    def noted(given: Any, low: float, room: int) -> Any:
        found.append(low)
        return above(given, low, room)

    monkeypatch.setattr(on_numpy, "above", noted)
    for _ in range(draws):
        found = list[float]()
        codec.encode(array, random)
        counts.append(int((abs(array) >= found[0]).sum()))
    assert np.mean(counts) / (0.01 * size) == pytest.approx(AIMS[text], abs=0.05)


def test_every_codec_that_samples_says_at_which_share_it_aims() -> None:
    kinds = {name: registry.load("codec", name) for name in registry.names("codec")}
    samples = {name for name, kind in kinds.items() if hasattr(kind, "sampled") or "SAMPLES" in vars(_module(kind))}
    assert {text.partition("(")[0] for text in AIMS} == samples


def _module(kind: type) -> Any:
    return sys.modules[kind.__module__]


def test_random_graphs_of_neighboring_seeds_are_independent() -> None:
    """Many first draws of two neighbors each are not connected: the next draws belong to no other seed."""
    drawn = [frozenset(map(frozenset, RandomRegularGraph(2, seed).graph(12).edges)) for seed in range(40)]
    assert len(set(drawn)) == len(drawn)
    topologies = [registry.load("topology", name) for name in registry.names("topology")]
    seeded = [kind for kind in topologies if any(one.name == "seed" for one in fields(kind))]
    assert seeded == [RandomRegularGraph], "the others need such a test"


@pytest.mark.parametrize("name", registry.names("selector"))
def test_selections_of_neighboring_seeds_are_independent(name: str) -> None:
    """No selection of a seed is that of another seed at another step."""
    selector = registry.load("selector", name)()
    turns = {
        (seed, turn): tuple(selector.pick(300, 0.2, seed, turn).tolist())
        for seed, turn in itertools.product(range(6), range(5))
    }
    assert all(turns[a] != turns[b] for a, b in itertools.combinations(turns, 2) if a[0] != b[0])
