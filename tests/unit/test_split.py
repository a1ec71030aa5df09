"""How samples are dealt out: every sample once, no worker without any, the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flockstep.errors import CompositionError, ConfigurationError
from flockstep.workloads.split import ByLabel, Dirichlet, Iid, Split

LABELS = np.repeat(np.arange(10), 60)


def classes(shard: np.ndarray) -> set[int]:
    return set(LABELS[shard].tolist())


@st.composite
def cases(draw: st.DrawFn) -> tuple[Split, np.ndarray, int, int]:
    split = draw(st.sampled_from([Iid(), ByLabel(), Dirichlet(0.001), Dirichlet(0.1), Dirichlet(100.0)]))
    labels = np.array(draw(st.lists(st.integers(-3, 4), min_size=1, max_size=60)))
    return split, labels, draw(st.integers(1, len(labels))), draw(st.integers(0, 2**40))


@given(cases())
def test_every_sample_goes_to_one_worker_and_none_is_empty(case: tuple[Split, np.ndarray, int, int]) -> None:
    split, labels, workers, seed = case
    shards = split.assign(labels, len(labels), workers, seed)
    assert len(shards) == workers
    assert min(map(len, shards)) >= 1
    assert np.array_equal(np.sort(np.concatenate(shards)), np.arange(len(labels)))
    assert all(shard.dtype == np.int64 for shard in shards)


@pytest.mark.parametrize("split", [Iid(), ByLabel(), ByLabel(3), Dirichlet(0.3)], ids=str)
def test_the_seed_and_nothing_else_decides(split: Split) -> None:
    first, again, other = (split.assign(LABELS, 600, 7, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_iid_shards_hold_every_class_and_need_no_labels() -> None:
    shards = Iid().assign(None, 600, 4, 0)
    assert [len(shard) for shard in shards] == [150] * 4
    assert all(len(classes(shard)) == 10 for shard in shards)


def test_by_label_cuts_the_sorted_samples() -> None:
    shards = ByLabel().assign(LABELS, 600, 5, 0)
    assert [classes(shard) for shard in shards] == [{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}]


@pytest.mark.parametrize(("workers", "each"), [(10, 1), (5, 2), (4, 3), (20, 2), (3, 10), (1, 10)])
def test_classes_per_worker_is_exact_and_loses_no_sample(workers: int, each: int) -> None:
    shards = ByLabel(each).assign(LABELS, 600, workers, 3)
    assert [len(classes(shard)) for shard in shards] == [each] * workers
    assert np.array_equal(np.sort(np.concatenate(shards)), np.arange(600))


@pytest.mark.parametrize(("workers", "each"), [(4, 2), (4, 11)])
def test_classes_per_worker_that_cannot_be(workers: int, each: int) -> None:
    with pytest.raises(ConfigurationError, match=r"classes_per_worker must be in \[3, 10\].*leave it out"):
        ByLabel(each).assign(LABELS, 600, workers, 0)


def test_a_class_too_small_for_its_workers() -> None:
    with pytest.raises(ConfigurationError, match=r"has only 1 samples for 2 workers.*lower"):
        ByLabel(2).assign(np.array([0, 0, 0, 1]), 4, 2, 0)


def test_dirichlet_is_skewed_for_a_small_alpha_and_even_for_a_large_one() -> None:
    def largest_share(alpha: float) -> float:
        counts = [np.bincount(LABELS[s], minlength=10) for s in Dirichlet(alpha).assign(LABELS, 600, 6, 0)]
        return float(np.max(counts, axis=0).mean() / 60)

    assert largest_share(0.01) > 0.9
    assert largest_share(1e4) < 0.2


@pytest.mark.parametrize("split", [ByLabel(), Dirichlet()], ids=str)
def test_no_classes_no_split_by_class(split: Split) -> None:
    with pytest.raises(CompositionError, match=r"needs a class for every sample.*use split iid"):
        split.assign(None, 600, 4, 0)


@pytest.mark.parametrize("split", [Iid(), ByLabel(), Dirichlet()], ids=str)
def test_impossible_numbers(split: Split) -> None:
    with pytest.raises(ConfigurationError, match="3 samples are too few for 4 workers; use at most 3"):
        split.assign(np.zeros(3, np.int64), 3, 4, 0)
    with pytest.raises(ConfigurationError, match="workers must be >= 1, got 0"):
        split.assign(np.zeros(3, np.int64), 3, 0, 0)
    with pytest.raises(ConfigurationError, match=r"labels must have the shape \(4,\)"):
        split.assign(np.zeros(3, np.int64), 4, 2, 0)


@pytest.mark.parametrize("text", ["by_label(0)", "dirichlet(0)", "dirichlet(-1)", "dirichlet(inf)"])
def test_hyper_parameters_out_of_range(text: str) -> None:
    with pytest.raises(ConfigurationError, match="must be"):
        Split.parse(text)
