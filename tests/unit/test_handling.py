"""What nodes spend on messages themselves, and how late the slowest worker of a step is."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from flockstep.costs.cluster import Rates
from flockstep.costs.cluster_file import load_cluster
from flockstep.errors import ConfigurationError
from flockstep.messages import HEADER_BYTES
from flockstep.nodes import Cluster
from flockstep.planning.job_profile import JobProfile, Site, task_of
from flockstep.planning.rehearsal import Conditions, rehearse
from flockstep.planning.step_prediction import on_cluster
from flockstep.records.config import RunConfig
from flockstep.simulation.compute import ComputeModel, ConstantTime
from flockstep.simulation.handling import Handled, Longer, Overheads
from flockstep.simulation.law import late_of, mean_of
from flockstep.simulation.network import Network
from flockstep.strategies.base import Strategy

TASK, NBYTES = JobProfile("job", 1000), 4000.0
NETWORK = Network.parse("link(1e6, 0.001)")
BUSY = (NBYTES + HEADER_BYTES) / 1e6


def seconds(text: str, work: Overheads, workers: int = 4) -> float:
    at = Conditions(ConstantTime(0.01), NETWORK, work)
    return rehearse(TASK, Strategy.parse(text), workers, at, steps=8).seconds_per_step


def test_a_server_handles_one_message_after_the_other() -> None:
    """n gradients come in and n models go out, and each costs its worker as much: 2 n + 2, less what the card takes."""
    free, handled = (seconds("ps", Overheads(message=cost)) for cost in (0.0, 0.01))
    assert BUSY < 0.01
    assert 5 * 0.01 < handled - free < (2 * 4 + 2) * 0.01


def test_a_ring_handles_a_message_of_its_own_and_one_of_its_neighbor_in_each_round() -> None:
    free, handled = (seconds("all_reduce", Overheads(message=cost)) for cost in (0.0, 0.01))
    assert handled - free == pytest.approx(2 * 3 * 2 * 0.01, rel=0.02)


def test_bytes_cost_servers_and_workers_that_receive_them() -> None:
    free = seconds("ps", Overheads())
    assert seconds("ps", Overheads(serve=1e-5)) - free > 3 * NBYTES * 1e-5
    assert seconds("ps", Overheads(receive=1e-5)) - free == pytest.approx(NBYTES * 1e-5, rel=0.02)
    assert seconds("all_reduce", Overheads(serve=1e-5)) == seconds("all_reduce", Overheads())


def test_bytes_that_cores_copy_slow_the_gradients_on_these_cores() -> None:
    """Four workers on two cores that send NBYTES to two neighbors, and receive as much, while the gradients go on."""

    def step(cost: float, compute: str) -> float:
        at = Conditions(ComputeModel.parse(compute), NETWORK, Overheads(copy=cost))
        return rehearse(TASK, Strategy.parse("dpsgd(topology=ring)"), 4, at, steps=12).seconds_per_step

    cost = 0.001 / NBYTES
    own, cores = "constant(0.05)", "shared_cores(constant(0.05), 2, turns=true)"
    assert step(cost, own) == pytest.approx(step(0.0, own)), "the network is slower than the copies"
    assert step(cost, cores) - step(0.0, cores) == pytest.approx(4 * 4 * 0.001 / 2, rel=0.15)


def test_steps_are_longer_by_the_optimizer() -> None:
    assert seconds("ps", Overheads(step=0.02)) - seconds("ps", Overheads()) == pytest.approx(0.02)
    law = Longer(ComputeModel.parse("shared_cores(constant(1), 2)"), 0.5)
    assert (law.sharing, next(law.stream(0, 0))) == (2, 1.5)


def test_factors_of_matrices_are_worked_out_and_decoded_twice() -> None:
    rates = Rates({"powersgd": 1e8}, {"powersgd": 5e7}, {})
    site = Site(JobProfile("x", 1_000_000, ((1000, 1000),)), replace(load_cluster("lab-1gbit"), rates=rates))
    plain, factored = (site.work(Strategy.parse(text), 4).step for text in ("all_reduce", "powersgd"))
    assert factored - plain == pytest.approx(1e6 / 1e8 + 2 * 1e6 / 5e7)


def test_a_run_in_virtual_time_takes_its_times_from_a_cluster_and_says_so() -> None:
    shape = replace(load_cluster("laptop"), message=2e-5, copy=3e-9, step=0.5)
    config = on_cluster(RunConfig(kind="simulate", job="softmax", strategy="ps", workers=4), shape)
    network, compute = Network.parse(str(config.network)), ComputeModel.parse(str(config.compute))
    assert isinstance(network, Handled)
    assert isinstance(compute, Longer)
    assert (network.message, network.copy) == (2e-5, 3e-9)
    assert network.serve > 0
    assert compute.extra == pytest.approx(0.5), "servers step the optimizer"
    assert (network.network, compute.base) == (shape.network(4), Site(task_of("softmax"), shape).compute(4))


def test_a_run_in_virtual_time_encodes_as_often_as_the_strategy_does() -> None:
    def extra(strategy: str) -> float:
        config = RunConfig(kind="simulate", job="softmax", strategy=strategy, workers=4)
        law = ComputeModel.parse(str(on_cluster(config, load_cluster("lab-1gbit")).compute))
        assert isinstance(law, Longer)
        return law.extra

    diloco = "streaming_diloco(period=32, fragments=1{})"
    seldom = extra(diloco.format(", codec=qsgd")) - extra(diloco.format(""))
    always = extra("all_reduce(codec=qsgd)") - extra("all_reduce")
    assert 0 < seldom < always / 5


def test_a_law_that_was_measured_is_that_of_the_jobs_own_batch() -> None:
    shape = replace(load_cluster("lab-1gbit"), job="softmax", operations=1e9)
    usual, large = (mean_of(Site(task_of("softmax", batch), shape).compute(4)) for batch in (None, 512))
    assert usual == mean_of(shape.law)
    assert large != usual


@pytest.mark.parametrize("name", ["message", "receive", "serve", "factor", "copy"])
def test_times_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        Handled(NETWORK, **{name: -1.0})
    with pytest.raises(ConfigurationError, match="extra"):
        Longer(ConstantTime(1.0), -1.0)


@pytest.mark.parametrize("workers", [2, 8, 64])
def test_the_slowest_of_exponential_times_is_later_than_the_mean_by_the_harmonic_number(workers: int) -> None:
    """Renyi (1953): the mean of the slowest of n is H_n times the mean."""
    expected = sum(1 / k for k in range(1, workers + 1)) - 1
    assert late_of(ComputeModel.parse("exponential(1)"), workers) == pytest.approx(expected, rel=0.1)


def test_speeds_make_the_slowest_late_and_constants_do_not() -> None:
    assert late_of(ConstantTime(1), 8) == 0
    assert late_of(ComputeModel.parse("speeds(constant(1), (1, 3))"), 2) == pytest.approx(1)
    assert math.isfinite(late_of(ComputeModel.parse("pareto(1, 1.5)"), 1024))


@pytest.mark.parametrize("cost", [{"message": 1e-3}, {"receive": 1e-6}, {"serve": 1e-6}, {"copy": 1e-6}])
def test_a_message_without_content_does_not_overtake_a_large_one(cost: dict[str, float]) -> None:
    for network, to in itertools.product(["link(1gbit, 50us)", "fair_link(1gbit, 50us)"], (1, -1)):
        fabric = Handled(Network.parse(network), **cost).start(Cluster(2, 1))
        sent = [fabric.depart(0, to, nbytes, 0.0) for nbytes in (8_000_000, HEADER_BYTES)]
        while waiting := [transit for transit in sent if not transit.done]:
            fabric.advance(min(waiting, key=lambda transit: transit.time))
        assert sent[0].time <= sent[1].time
