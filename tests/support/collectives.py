"""Collectives on their own, without training; the sums that they should give; one of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flockstep.arrays.schema import slices
from flockstep.collectives.auto import Auto
from flockstep.collectives.base import Collective
from flockstep.collectives.binomial_tree import BinomialTree
from flockstep.collectives.double_tree import DoubleTree
from flockstep.collectives.hierarchical import HierarchicalCollective
from flockstep.collectives.pipelined import Pipelined
from flockstep.collectives.rabenseifner import Rabenseifner
from flockstep.collectives.recursive_doubling import RecursiveDoubling
from flockstep.collectives.ring import Ring
from flockstep.strategies.base import Strategy, Traits
from flockstep.testing.strategies import bowl_job, run_strategy


@dataclass(frozen=True)
class Does(Strategy):
    """Every worker starts each step from `given[rank, step]` and does `what` with it."""

    what: Any = None
    given: Any = None
    out: dict[Any, Any] = field(default_factory=dict)

    @property
    def traits(self):
        return Traits(delivery="synchronous", survives=False, results=("rank0",))

    async def worker(self, me):
        while me.training:
            await me.gradient()
            array = self.given[me.rank, me.step - 1].copy()
            self.out[me.rank, me.step] = (await self.what(me, array), array)


def arrays(n, size, steps=1, dtype="float32", seed=0):
    return np.random.default_rng(seed).normal(size=(n, steps, size)).astype(dtype)


def does(what, given, **options):
    """The run, and what each rank got in its last step: its return value and its array."""
    n, steps, _ = given.shape
    strategy = Does(what, given)
    job = bowl_job(dimension=3, dtype="float64")
    run = run_strategy(strategy, n, steps, job=job, **options)
    return run, [strategy.out[rank, steps] for rank in range(n)]


def summed(collective, given, **options):
    run, got = does(collective.all_reduce, given, **options)
    return run, [array for _, array in got]


def chain_sum(rows):
    total = rows[0].copy()
    for row in rows[1:]:
        total = total + row
    return total


def doubling_sum(rows):
    power = 1 << (len(rows).bit_length() - 1)
    level = [rows[i] + rows[i + power] if i + power < len(rows) else rows[i] for i in range(power)]
    while len(level) > 1:
        level = [level[i] + level[i + 1] for i in range(0, len(level), 2)]
    return level[0].copy()


def ring_sum(rows):
    n = len(rows)
    parts = slices(len(rows[0]), n)
    return np.concatenate([chain_sum([rows[(c + hop) % n][part] for hop in range(n)]) for c, part in enumerate(parts)])


def binomial_sum(rows):
    """The first half and the second, cut at the largest power of two: subtrees from the nearest to the farthest."""
    sums, distance = [row.copy() for row in rows], 1
    while distance < len(rows):
        for rank in range(0, len(rows) - distance, 2 * distance):
            sums[rank] = sums[rank] + sums[rank + distance]
        distance *= 2
    return sums[0]


def in_order_tree_sum(rows):
    """The root of 2^k - 1 ranks on its left; own array, then the left sum, then the right."""
    if len(rows) == 0:
        return None
    root = (1 << (len(rows).bit_length() - 1)) - 1
    total = rows[root]
    for subtree in (rows[:root], rows[root + 1 :]):
        if len(subtree):
            total = total + in_order_tree_sum(subtree)
    return total


def double_tree_sum(rows):
    half = slices(len(rows[0]), 2)[0].stop
    first = in_order_tree_sum([row[:half] for row in rows])
    return np.concatenate([first, in_order_tree_sum([row[half:] for row in [*rows[1:], rows[0]]])])


def two_level_sum(group, outer):
    def total(rows):
        r = min(group, len(rows))
        full = len(rows) - len(rows) % r
        rows = [row + rows[i + r] if full <= i + r < len(rows) else row for i, row in enumerate(rows[:full])]
        inside = [ring_sum(rows[start : start + r]) for start in range(0, full, r)]
        return np.concatenate([outer([row[part] for row in inside]) for part in slices(len(rows[0]), r)])

    return total


CASES = {
    "rabenseifner": (Rabenseifner(), doubling_sum),
    "binomial_tree": (BinomialTree(), binomial_sum),
    "pipelined": (Pipelined(chunks=3), chain_sum),
    "double_tree": (DoubleTree(chunks=2), double_tree_sum),
    "hierarchical": (HierarchicalCollective(group=2), two_level_sum(2, ring_sum)),
    "hierarchical_3": (HierarchicalCollective(3, RecursiveDoubling()), two_level_sum(3, doubling_sum)),
    "ring": (Ring(), ring_sum),
    "recursive_doubling": (RecursiveDoubling(), doubling_sum),
    "auto": (Auto(), lambda rows: CASES[str(Auto().choose(len(rows), rows[0].nbytes)).split("(")[0]][1](rows)),
    "sparse": (Collective.parse("sparse"), ring_sum),
}
