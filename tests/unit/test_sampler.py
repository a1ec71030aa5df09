"""A worker's stream of batches: complete, its own, and continued bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flockstep.errors import ConfigurationError
from flockstep.workloads.sampler import Sampler, SamplerState, steps_for

SHARD = np.arange(100, 137)


def draw(sampler: Sampler, count: int) -> np.ndarray:
    return np.stack([sampler.next() for _ in range(count)])


@given(size=st.integers(1, 40), batch=st.integers(1, 50), count=st.integers(1, 20), seed=st.integers(0, 2**40))
def test_the_stream_is_permutation_after_permutation(size: int, batch: int, count: int, seed: int) -> None:
    shard = np.arange(size) * 3
    batches = draw(Sampler(shard, batch, seed, rank=2), count)
    assert batches.shape == (count, batch)
    assert batches.dtype == np.int64
    stream = batches.ravel()
    for start in range(0, len(stream) - size + 1, size):
        assert np.array_equal(np.sort(stream[start : start + size]), shard)
    tail = stream[len(stream) // size * size :]
    assert len(set(tail.tolist())) == len(tail)


@given(batch=st.integers(1, 90), before=st.integers(0, 12))
def test_a_restored_sampler_goes_on_bit_for_bit(batch: int, before: int) -> None:
    first, second = Sampler(SHARD, batch, 5, 1), Sampler(SHARD, batch, 5, 1)
    for _ in range(before):
        first.next()
    second.restore(first.state())
    assert np.array_equal(draw(first, 10), draw(second, 10))
    assert first.state() == second.state()


def test_epochs_ranks_and_seeds_have_orders_of_their_own() -> None:
    orders = [Sampler(SHARD, 37, seed, rank).next().tolist() for seed in (0, 1) for rank in (0, 1, 2)]
    orders.append(draw(Sampler(SHARD, 37, 0, 0), 2)[1].tolist())
    assert len({tuple(order) for order in orders}) == 7


@pytest.mark.parametrize("state", [SamplerState(0, 1000), SamplerState(-1, 0), SamplerState(0, -1)])
def test_a_state_of_another_shard(state: SamplerState) -> None:
    with pytest.raises(ConfigurationError, match=r"position must be in \[0, 999\]"):
        Sampler(SHARD, 4, 0, 0).restore(state)


@pytest.mark.parametrize(
    ("size", "batch", "seed", "rank", "text"),
    [
        (0, 1, 0, 3, "worker 3 must hold >= 1"),
        (5, 0, 0, 0, "batch must be >= 1"),
        (5, 1, -1, 0, "must be >= 0"),
        (5, 1, 0, -1, "must be >= 0"),
    ],
)
def test_bad_arguments(size: int, batch: int, seed: int, rank: int, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Sampler(np.arange(size), batch, seed, rank)


@pytest.mark.parametrize(
    ("epochs", "size", "workers", "batch", "steps"),
    [(1, 100, 1, 10, 10), (1, 101, 1, 10, 11), (0.001, 100, 4, 32, 1), (22, 1437, 4, 32, 247), (0.1, 30, 1, 1, 3)],
)
def test_steps(epochs: float, size: int, workers: int, batch: int, steps: int) -> None:
    assert steps_for(epochs, size, workers, batch) == steps


@pytest.mark.parametrize("arguments", [(0, 1, 1, 1), (float("inf"), 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)])
def test_steps_of_nothing(arguments: tuple[float, int, int, int]) -> None:
    with pytest.raises(ConfigurationError, match="must be"):
        steps_for(*arguments)
