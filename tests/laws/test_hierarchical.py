"""Two levels of servers: the flat server's trajectory, the root's traffic, and what a leaf may not lose."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.arrays.schema import slices
from flockstep.errors import CompositionError, ConfigurationError
from flockstep.messages import MASTER, Message, server
from flockstep.records.events import EvaluationEvent, UpdateEvent
from flockstep.strategies.hierarchical import Hierarchical
from flockstep.testing.strategies import GradientSource, Watched, check_strategy, equal_bits, run_strategy, small_job

STEPS = 12
MODES = ["", ", root=asynchronous", ", leaf=asynchronous, root=asynchronous"]


def groups(n, group):
    return [range(part.start, part.stop) for part in slices(n, -(-n // group))]


def oracle(n, group, optimizer, steps=STEPS):
    """One model; every step takes the groups' sums, each added in order of rank, over n."""
    source = GradientSource(n, small_job(optimizer))
    w = source.start()
    stepper = source.stepper(w)
    for _ in range(steps):
        gradients = [source.gradient(rank, w) for rank in range(n)]
        sums = [sum((gradients[r] for r in ranks[1:]), gradients[ranks[0]]) for ranks in groups(n, group)]
        stepper.step(w, sum(sums[1:], sums[0]) / w.dtype.type(n))
    return w


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group", [1, 2, 5])
def test_promises(mode, group):
    """Asynchronous leaves answer before the root has stepped, so that one worker too is late."""
    check_strategy(
        Hierarchical.parse(f"hierarchical({group}{mode})"),
        (1, 2, 5),
        10,
        "leaf" not in mode,
    )


@pytest.mark.oracle("strategy:hierarchical")
@pytest.mark.parametrize("optimizer", ["sgd(lr=0.1)", "sgd(lr=0.1, momentum=0.9)", "adam(lr=0.02)"])
@pytest.mark.parametrize(("n", "group"), [(1, 4), (3, 2), (4, 2), (4, 4), (7, 3), (8, 1)])
def test_equals_the_oracle(optimizer, n, group):
    run = run_strategy(f"hierarchical({group})", n, STEPS, job=small_job(optimizer))
    assert equal_bits(*run.params.values(), oracle(n, group, optimizer))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("n", "group"), [(8, 2), (8, 4), (16, 4), (6, 6)])
def test_the_roots_traffic_is_a_group_th(mode, n, group):
    flat = run_strategy("ps(bsp)", n, STEPS).totals[MASTER]
    run = run_strategy(f"hierarchical({group}{mode})", n, STEPS)
    root, leaves = run.totals[MASTER], [run.totals[server(1 + i)] for i in range(n // group)]
    assert root.received_bytes * group == flat.received_bytes
    assert flat.sent_bytes <= root.sent_bytes * group <= flat.sent_bytes + ("async" in mode) * n * 18 * 4
    assert sum(leaf.received_bytes for leaf in leaves) == flat.received_bytes + root.sent_bytes
    assert all(
        leaf.sent_bytes
        == (flat.sent_bytes + flat.received_bytes) / (n // group) / 2 + root.received_bytes / len(leaves)
        for leaf in leaves
    )


@pytest.mark.parametrize("mode", MODES)
def test_every_gradient_takes_effect_once_on_every_server(mode):
    run = run_strategy(f"hierarchical(3{mode})", 7, STEPS)
    assert run.deliveries() == {(server(i), rank): STEPS for i in range(4) for rank in range(7)}
    assert equal_bits(run.result, *(run.params[server(i)] for i in range(4)))


def test_the_models_on_the_way_are_evaluated_on_the_way():
    """The root hears of the workers' steps from its leaves alone."""
    for mode in MODES:
        run = run_strategy(f"hierarchical(2{mode})", 4, STEPS, evaluate_every=3)
        snapshots = run.of(EvaluationEvent)
        assert [s.step for s in snapshots][:4] == [0, 3, 6, 9]
        assert len({s.loss for s in snapshots}) >= 4
        events = run.events
        assert events.index(snapshots[2]) < len(events) / 2 + len(events) / 4


def mean_staleness(run):
    late = [event.staleness for event in run.of(UpdateEvent) if event.staleness is not None]
    return sum(late) / len(late)


def test_staleness_is_counted_in_the_roots_updates():
    """L leaves that take turns: a sum is L - 1 updates late. Cached answers are late by about one round trip more."""
    run = run_strategy("hierarchical(2, root=asynchronous)", 8, 200)
    assert mean_staleness(run) == pytest.approx(3, abs=0.1)
    cached = run_strategy("hierarchical(2, leaf=asynchronous, root=asynchronous)", 8, 200)
    assert mean_staleness(cached) > mean_staleness(run)
    assert mean_staleness(run_strategy("hierarchical(2)", 8, STEPS)) == 0


def test_a_root_that_waits_for_leaves_that_do_not_is_refused():
    with pytest.raises(CompositionError, match="root=asynchronous"):
        Hierarchical(leaf="asynchronous")
    with pytest.raises(ConfigurationError, match="group must be >= 1"):
        Hierarchical(0)


class SendsMeans(Watched):
    """Negative control: every leaf's sum weighs the same, however many workers it stands for."""

    def send(self, to, message):
        if message.tag == "sum":
            array = message.array / np.float32(len(message.note.ranks) * 3 / 7)
            message = Message(message.source, message.tag, array, message.note, number=message.number)
        super().send(to, message)


@pytest.mark.negative_control("strategy:hierarchical")
def test_the_oracle_notices_another_weight():
    """Three leaves, of 3, 2 and 2 workers: the mean of their means is not the mean."""
    run = run_strategy("hierarchical(3)", 7, STEPS, simulation=SendsMeans)
    assert not np.allclose(run.result, oracle(7, 3, "sgd(lr=0.1)"), rtol=1e-3)
