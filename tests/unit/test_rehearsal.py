"""Rehearsals: against the records of long runs in virtual time, and what they must refuse or bound."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable

import pytest

from flockstep.costs.cluster_file import load_cluster
from flockstep.errors import ConfigurationError
from flockstep.launchers.simulate import simulate
from flockstep.planning.job_profile import JobProfile, Site, task_of
from flockstep.planning.rehearsal import SURE, Conditions, Rehearsal, rehearse
from flockstep.planning.step_prediction import predict_step
from flockstep.planning.surrogate import Unrehearsed, longest_cycle, scaled, shrunk
from flockstep.records.config import RunConfig
from flockstep.records.events import StepEvent
from flockstep.records.folder import RunFolder
from flockstep.runtime.setup import load_job
from flockstep.simulation.compute import ComputeModel
from flockstep.simulation.network import Network
from flockstep.strategies.base import Strategy
from support.clusters import equal_machines
from support.matrix import few

JOB = "softmax(features=300, train=512, test=64, batch=16)"
WORKERS, STEPS = 4, 400
NETWORK, COMPUTE = "link(2e6, 0.001)", "lognormal(0.01, sigma=0.2)"
LIKE = (
    "local_sgd(period=32)",
    "streaming_diloco",
    "powersgd",
    "decoupled_momentum",
    "bucketed(cap=0.005, first=0.001)",
    "mpca",
    "codistillation",
    "easgd(period=32)",
    "sufficient_factors",
    "all_reduce(codec=topk, feedback=residual)",
)


@functools.cache
def task() -> JobProfile:
    return task_of(JOB, None, load_job(JOB, 0))


def rehearsed(text: str, its: JobProfile | None = None, steps: int | None = None) -> Rehearsal:
    at = Conditions(ComputeModel.parse(COMPUTE), Network.parse(NETWORK))
    return rehearse(its or task(), Strategy.parse(text), WORKERS, at, steps=steps)


Recorded = Callable[[str], tuple[float, float]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Seconds and bytes of a step in a long run with real gradients, the first quarter left out, by strategy."""

    @functools.cache
    def run(text: str) -> tuple[float, float]:
        folder = tmp_path_factory.mktemp("long") / "run"
        simulate(
            RunConfig(
                kind="simulate", job=JOB, strategy=text, workers=WORKERS, steps=STEPS, network=NETWORK, compute=COMPUTE
            ),
            folder,
        )
        steps = [one for one in RunFolder(folder).read_events() if isinstance(one, StepEvent) and one.step > STEPS // 4]
        took = statistics.fmean(one.compute_seconds + one.wait_seconds + one.comm_seconds for one in steps)
        return took, statistics.fmean(one.sent_bytes for one in steps)

    return run


@pytest.mark.parametrize("text", few(LIKE, LIKE[0], "powersgd", "codistillation", LIKE[-1]))
def test_a_rehearsal_is_like_a_long_run(text: str, recorded: Recorded) -> None:
    seconds, sent = recorded(text)
    found = rehearsed(text)
    assert found.seconds_per_step == pytest.approx(seconds, rel=0.05)
    assert found.sent_bytes_per_step == pytest.approx(sent, rel=0.05)


def test_few_steps_and_flat_tensors_are_not(recorded: Recorded) -> None:
    """Negative control: 16 steps and one-dimensional tensors are not enough."""
    _, sent = recorded("local_sgd(period=32)")
    assert rehearsed("local_sgd(period=32)", steps=16).sent_bytes_per_step == 0 < sent
    for text in ("powersgd", "decoupled_momentum"):
        _, sent = recorded(text)
        flat = dataclasses.replace(task(), tensors=tuple((math.prod(shape),) for shape in task().tensors))
        assert rehearsed(text, flat).sent_bytes_per_step > 1.2 * sent


def cluster(bandwidth: str = "1gbit", compute: str = "constant(0.01)", count: int = 4, more: str = "") -> Site:
    return Site(task(), equal_machines(bandwidth, compute, count, more))


@pytest.mark.parametrize(
    "text",
    few(
        ["all_reduce", "local_sgd(period=32)", "streaming_diloco", "powersgd", "codistillation"],
        "all_reduce",
        "codistillation",
    ),
)
def test_on_an_uneven_cluster_what_is_promised_is_what_a_long_rehearsal_takes(text: str) -> None:
    """Two sites: steps are those of a run of 600, and bytes those of the model's own matrices."""
    strategy, site = Strategy.parse(text), Site(task(), load_cluster("two-sites"))
    found = predict_step(strategy, site, 4)
    long = rehearse(site.task, strategy, 4, Conditions(site.compute(4), site.cluster.network(4)), steps=600)
    assert found.sent_bytes == pytest.approx(long.sent_bytes_per_step, rel=0.05)
    assert found.seconds >= 0.95 * long.seconds_per_step


def test_all_reduce_on_two_sites_is_no_power_sgd() -> None:
    site = Site(task(), load_cluster("two-sites"))
    few, all_of_it = (predict_step(Strategy.parse(text), site, 4).sent_bytes for text in ("powersgd", "all_reduce"))
    assert few < all_of_it / 3


def test_a_step_that_nobody_waits_in_takes_as_long_as_its_gradient() -> None:
    """Nobody waits in gossip: messages pile up where the card is too slow, and the rehearsal is told as it is."""
    site = cluster("1mbit", "constant(0.001)")
    found = predict_step(Strategy.parse("gossip"), site, 4)
    assert found.seconds == pytest.approx(0.001, rel=0.1)
    assert found.sent_bytes / site.link[1] > 2 * found.seconds


def test_a_server_s_card_counts_too() -> None:
    found = predict_step(
        Strategy.parse("factor_server(consistency=bsp)"), cluster("1mbit", "constant(0.0001)", count=8), 8
    )
    assert found.seconds >= 0.5 * 7 / 8 * found.server_bytes / 125_000  # one of the 8 workers is beside the server


@pytest.mark.parametrize("text", ["ensemble", "tree_server", "gossip", "tree_easgd", "codistillation"])
def test_gradients_that_take_no_time(text: str) -> None:
    found = predict_step(Strategy.parse(text), cluster("1gbit", "constant(0)"), 4)
    assert found.seconds >= task().elements / 1.001e9, "the optimizer's step takes time"
    assert found.samples_per_second == pytest.approx(4 * 16 / found.seconds)


def test_workers_of_different_speed_that_run_freely_each_count_at_their_own_pace() -> None:
    job = JobProfile("job", 10_000)
    at = Conditions(ComputeModel.parse("speeds(constant(0.01), (1, 2, 4))"), Network.parse("link(1e9, 0.0001)"))
    free = rehearse(job, Strategy.parse("gossip"), 3, at)
    assert free.steps_per_second == pytest.approx(100 * (1 + 1 / 2 + 1 / 4), rel=0.02)
    assert free.seconds_per_step == pytest.approx(0.01 * (1 + 2 + 4) / 3, rel=0.02)
    bound = rehearse(job, Strategy.parse("all_reduce"), 3, at)
    assert bound.steps_per_second == pytest.approx(3 / bound.seconds_per_step)
    assert bound.seconds_per_step == pytest.approx(0.04, rel=0.05)


def test_who_sends_nothing_however_long_it_is_looked_at_is_refused() -> None:
    with pytest.raises(Unrehearsed, match="sent nothing"):
        rehearsed("local_sgd(period=5000)")
    assert rehearsed("ensemble").sent_bytes_per_step == 0


def test_memory_counts_what_the_strategy_keeps() -> None:
    plain, momentum = (predict_step(Strategy.parse(text), cluster(), 4).memory for text in ("all_reduce", "eamsgd"))
    outputs = 16 * (10 + 10) * 4  # of the product and of the softmax, for 16 samples
    assert plain == task().nbytes * (2 + task().slots) + outputs
    assert momentum == pytest.approx(plain + task().nbytes, rel=0.01)


LARGE = JobProfile("large", 40_000_000, ((5000, 4000), (4000, 5000)))


@pytest.mark.parametrize("text", ["bucketed", "all_reduce(collective=auto)", "local_sgd(period=32)"])
def test_sizes_shrink_with_the_stand_in(text: str) -> None:
    """160 MB take as long over a link as 1.6 MB over one a hundredth as fast."""
    law, strategy = ComputeModel.parse("constant(0.05)"), Strategy.parse(text)
    little = JobProfile("little", LARGE.elements // 100, ((500, 400), (400, 500)))
    large = rehearse(LARGE, strategy, 4, Conditions(law, Network.parse("link(1.25e9, 0.00005)")))
    small = rehearse(little, scaled(strategy, 100), 4, Conditions(law, Network.parse("link(1.25e7, 0.00005)")))
    assert large.seconds_per_step == pytest.approx(small.seconds_per_step, rel=0.02)
    assert large.sent_bytes_per_step == pytest.approx(100 * small.sent_bytes_per_step, rel=0.02)


def test_what_no_stand_in_can_say_is_refused() -> None:
    site = dataclasses.replace(cluster(), task=LARGE)
    with pytest.raises(ConfigurationError, match="the messages depend on the shapes of matrices"):
        rehearse(LARGE, Strategy.parse("powersgd"), 4, Conditions(site.compute(4), site.cluster.network(4)))
    with pytest.raises(ConfigurationError, match="only the size of this model is known"):
        predict_step(Strategy.parse("sufficient_factors"), site, 4)


def test_a_matrix_with_a_short_side_is_no_vector() -> None:
    """Factors of 20,000 × 10 have rank (20,000 + 10) elements; a surrogate of 1,431 × 1 would send itself."""
    tall = JobProfile("tall", 200_010, ((20_000, 10), (10,)))
    found = predict_step(Strategy.parse("powersgd(rank=2)"), dataclasses.replace(cluster(), task=tall), 4)
    assert found.sent_bytes == pytest.approx(1.5 * 4 * (2 * 20_010 + 10), rel=0.02)


def test_matrices_shrink_to_matrices() -> None:
    found = shrunk((*LARGE.tensors, (64, 32, 3, 3), (4000,)), 8192)
    assert [len(shape) for shape in found] == [2, 2, 4, 1]
    assert sum(map(math.prod, found)) == pytest.approx(8192, rel=0.1)
    assert found[2][2:] == (3, 3)
    assert shrunk(((3, 4),), 8192) == ((3, 4),)


def test_what_counts_as_a_cycle_and_what_as_a_size() -> None:
    cycles = {
        "local_sgd(period=32)": 32,
        "streaming_diloco": 100,
        "all_reduce": 1,
        "decoupled_momentum": 1,
        "codistillation": 50,
    }
    assert {text: longest_cycle(Strategy.parse(text), 640) for text in cycles} == cycles
    assert longest_cycle(Strategy.parse("streaming_diloco"), 50) == 5
    assert scaled(Strategy.parse("bucketed"), 100) == Strategy.parse("bucketed(cap=0.25, first=0.01)")
    assert scaled(Strategy.parse("all_reduce"), 100) == Strategy.parse("all_reduce")


def test_steps_are_rehearsed_until_their_range_is_narrow() -> None:
    """A barrier's waiting follows from the slowest draw, whose mean is known; that of a wait for neighbors does not."""
    barrier, neighbors = rehearsed("all_reduce"), rehearsed("dpsgd", steps=None)
    assert barrier.range <= SURE
    assert barrier.steps < neighbors.steps
