"""Whose samples a worker sees, and how many deaths a strategy survives: the traits against what runs show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flockstep.errors import ConfigurationError, UnknownName
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.numpy import SoftmaxRegression
from flockstep.programs import NeedGradient
from flockstep.runtime.plan import Batches
from flockstep.strategies.base import Strategy, Traits
from flockstep.testing.strategies import Sent, Watched, run_strategy
from flockstep_lab import failures
from flockstep_lab.failure_matrix import rows

WORKERS = 4


class Looking(Watched):
    """A simulation that keeps which training samples each worker's gradients are over."""

    seen: dict[int, set[int]]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen = {rank: set() for rank in range(len(self._gradients.batches))}
        for rank, batches in enumerate(self._gradients.batches):
            self._watch(rank, batches)

    def _watch(self, rank: int, batches: Batches) -> None:
        chosen = batches.next

        def next_batch(need: NeedGradient) -> Any:
            indices = chosen(need)
            self.seen[rank].update(int(i) for i in indices)
            return indices

        batches.next = next_batch  # type: ignore[method-assign]


def wide_job() -> Job:
    """Softmax regression whose matrix is larger than the factors of its gradient over two samples."""

    def data() -> Data:
        random = np.random.default_rng(7)
        x = random.normal(size=(96, 40)).astype(np.float32)
        return Data(x[:80], random.integers(0, 30, 80), x[80:], random.integers(0, 30, 16))

    return Job(lambda: SoftmaxRegression(40, 30), data, "sgd(lr=0.1)", batch=2)


def observed(strategy: str) -> str:
    """What becomes of samples: `others` where a worker computes on another's, `sent` where a message holds one."""
    job = wide_job()
    run = run_strategy(strategy, WORKERS, 24, job=job, simulation=Looking)
    parts = [set(map(int, part)) for part in run.simulation.plan.parts]
    assert isinstance(run.simulation, Looking)
    if any(not samples <= parts[rank] for rank, samples in run.simulation.seen.items()):
        return "others"
    samples = [row.tobytes() for row in job.data().train_x]
    sent = [entry.message.array for entry in run.simulation.log if isinstance(entry, Sent)]
    held = [np.asarray(array).tobytes() for array in sent if array is not None]
    return "sent" if any(sample in message for message in held for sample in samples) else "own"


@pytest.mark.parametrize("strategy", [row.strategy for row in rows()])
def test_where_samples_go_is_what_the_trait_says(strategy: str) -> None:
    assert Strategy.parse(strategy).traits.samples == observed(strategy)


def test_each_way_is_observed_somewhere() -> None:
    """Negative control: the observation tells the three apart."""
    assert observed("gradient_coding") == "others"
    assert observed("gradient_coding(s=0)") == "own"
    assert observed("factor_server") == "sent"
    assert observed("ps") == "own"


@pytest.mark.parametrize(
    ("strategy", "workers", "survived"),
    [
        ("ps(consistency=backup(b=2))", 5, 2),
        ("ps(consistency=backup(b=0))", 3, 0),
        ("ps(consistency=k_sync(k=1))", 3, 2),
        ("ps(consistency=k_sync(k=3))", 4, 1),
        ("ps(consistency=k_batch_sync(k=3))", 4, 3),
        ("gradient_coding(s=2, scheme=cyclic)", 5, 2),
        ("gradient_coding(s=2)", 3, 2),
        ("ps(consistency=ssp(s=0))", 3, 0),
        ("gossip", 5, 4),
        ("all_reduce", 5, 0),
    ],
)
def test_as_many_deaths_are_survived_as_the_trait_says(strategy: str, workers: int, survived: int) -> None:
    """By the papers: n - N backup workers (Chen et al. 2016), n - K learners (Dutta et al. 2018), s of a code."""
    traits = Strategy.parse(strategy).traits
    word = failures.dead_worker(strategy, workers)
    if word in (failures.ENDS, failures.STALLS):
        count = 0
    else:
        count = int(word.split("up to ")[1].split()[0]) if "up to" in word else workers - 1
    assert count == survived
    assert traits.deaths(workers) == survived
    assert bool(traits.survives) == (survived > 0)


def test_deaths_by_number_of_workers() -> None:
    any_number, three, all_but_two = (
        Traits("partial", True, ("mean",)),
        Traits("partial", 3, ("mean",)),
        Traits("partial", True, ("mean",), least=2),
    )
    assert [one.deaths(8) for one in (any_number, three, all_but_two)] == [7, 3, 6]
    assert [one.deaths(2) for one in (any_number, three, all_but_two)] == [1, 1, 0]
    assert Traits("partial", False, ("mean",)).deaths(8) == 0


@pytest.mark.parametrize("delivery", [1, "asynchronous"])
def test_a_delivery_that_does_not_exist_is_refused(delivery):
    with pytest.raises(UnknownName, match=f"no delivery is called '{delivery}'; known: bounded delay, partial, sync"):
        Traits(delivery, survives=False, results=("rank0",))


def test_values_that_do_not_exist_are_refused():
    with pytest.raises(UnknownName, match="no result is called 'servers'; known: best, ensemble, mean, rank0, server"):
        Traits("partial", survives=False, results=("mean", "servers"))
    with pytest.raises(ConfigurationError, match=r"results must be a tuple, got 'mean'; write it like \('mean', "):
        Traits("partial", survives=False, results="mean")
    with pytest.raises(UnknownName, match="no memory is called 'momentum'; known: optimizer, own, slices, velocity"):
        Traits("partial", survives=False, results=("mean",), memory="momentum")
