"""How many calls of our functions lie on a gradient's way: a figure that grows unnoticed."""

from __future__ import annotations

import pytest

from support.benchmarks import benchmark

hops = benchmark("hops")


@pytest.mark.parametrize(("strategy", "most"), [("all_reduce", 22), ("ps(consistency=bsp)", 77)])
def test_a_step_of_a_loop_alone_takes_few_calls(strategy: str, most: int) -> None:
    assert 10 < hops.own_loop(strategy).total() <= most


def test_a_step_of_a_ring_in_virtual_time_takes_few_calls() -> None:
    workers, steps = 4, 40
    counted = hops.virtual("all_reduce(collective=ring)", workers, steps)
    assert 50 < counted.total() / (workers * steps / 2) <= 202
