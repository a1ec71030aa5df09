"""The time that models for evaluation add to a predicted step, against figures computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flockstep.costs.cluster_file import read_cluster
from flockstep.nodes import Hosts
from flockstep.planning.check import evaluation_seconds
from flockstep.planning.step_prediction import StepPrediction
from flockstep.records.config import RunConfig

RUN = RunConfig(kind="train", job="softmax", strategy="all_reduce", workers=4, steps=100, evaluate_every=5.0)
FOUR: Hosts = ((0,), (1,), (2,), (3,))
MODEL = 100_000
CLUSTER = """
compute = "constant(0.01)"
[nodes.a]
count = {count}
workers = {workers}
[[links]]
node = "a"
bandwidth = "8000gbit"
[[links]]
inside = "a"
bandwidth = "8mbit"
"""
STEP = StepPrediction("all_reduce", None, 4, 0.1, 0.25, 50_000, 0.0, None, None, 0.0, 0.0, "rehearsal")
"""A step of 100 ms, in 75 ms of which workers wait, and the link of 1 MB/s carries bytes for 50 ms."""


def longer(step: StepPrediction, run: RunConfig = RUN, hosts: Hosts = FOUR) -> float:
    shape = read_cluster(CLUSTER.format(count=len(hosts), workers=len(hosts[0])), name="test")
    return evaluation_seconds(step, run, hosts, MODEL, shape)[0]


def test_nothing_is_added_where_no_model_crosses_a_link() -> None:
    """Negative control: on one host, without evaluations between the first and the last step, in virtual time, and on
    hosts that are not those of the run's workers.
    """
    assert longer(STEP, hosts=((0, 1, 2, 3),)) == 0
    assert longer(STEP, hosts=((0,), (1,), (2,))) == 0
    assert longer(STEP, replace(RUN, evaluate_every=100.0)) == 0
    assert longer(STEP, replace(RUN, kind="simulate")) == 0


def test_a_step_becomes_longer_by_what_does_not_pass_while_workers_compute() -> None:
    """Three models of 100 kB at 1 MB/s every 5 steps take 60 ms of the link per step; h m = 3 x 50 ms, c = 50 ms. Two
    models of one other host take 40 ms; h m = 50 ms.
    """
    assert longer(STEP) == pytest.approx(0.06 * 0.15 / (0.05 + 0.15))
    assert longer(STEP, hosts=((0, 1), (2, 3))) == pytest.approx(0.04 * 0.05 / (0.05 + 0.05))
    assert longer(STEP, replace(RUN, evaluate_every=50.0)) == pytest.approx(0.1 * longer(STEP))


def test_what_a_server_sends_and_what_the_worker_beside_it_pushes_do_not_enter_the_card() -> None:
    """Of 80 kB through the server, 40 kB enter, 30 kB of them from other hosts: 30 ms of the link in each step."""
    served = replace(STEP, sent_bytes=10_000, server_bytes=80_000)
    assert longer(served) == pytest.approx(0.06 * 3 * 0.03 / (0.07 + 3 * 0.03))


def test_workers_that_do_not_wait_are_slowed_only_by_a_full_link() -> None:
    """A gradient of 10 ms hides 5 ms of messages, but not 60 ms of models besides."""
    free = replace(STEP, seconds=0.01, utilization=1.0, sent_bytes=5_000)
    assert longer(free) == pytest.approx(0.005 + 0.06 - 0.01)
    assert longer(free, replace(RUN, evaluate_every=75.0)) == 0.0  # 4 ms of models fit beside 5 ms of messages


def test_the_note_gives_the_step_with_and_without_evaluations() -> None:
    shape = read_cluster(CLUSTER.format(count=4, workers=1), name="test")
    (note,) = evaluation_seconds(STEP, RUN, FOUR, MODEL, shape)[1]
    assert note == (
        "workers send 300 kB to the coordinator's host every 5 steps for evaluation: with these models a step is "
        "predicted to take 145 ms, without them 100 ms"
    )
