"""Server update rules against plain numpy: scaled by staleness, compensated for delay, with momentum of any sign."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.nodes import Cluster, Server
from flockstep.optimizers import Optimizer
from flockstep.strategies.base import Strategy
from flockstep.strategies.consistency import Push
from flockstep.strategies.server_updates.base import ServerUpdate
from flockstep.strategies.server_updates.delay_compensated import DelayCompensated
from flockstep.strategies.server_updates.staleness_scaled import StalenessScaled, weighted_mean
from flockstep.testing.strategies import GradientSource, bowl_job, check_strategy, equal_bits, run_strategy, small_job
from support.matrix import few
from support.servers import STEPS, FakeServer, oracle, served

F = np.float32
MOMENTUM = "sgd(lr=0.1, momentum=0.9)"
RULES = [
    "staleness_scaled",
    "staleness_scaled('mean')",
    "delay_compensated",
    "delay_compensated('constant')",
    "momentum_corrected",
    "momentum_corrected(0.5)",
    "negative_momentum",
    "with_optimizer(adagrad(0.05))",
    "with_optimizer(adam(0.01))",
    "proximal(0.01)",
]


def stepping(server):
    """Let `server.update` take steps of the server's optimizer, with a state of its own."""
    state, server.cluster = server.optimizer.init(server.params), Cluster(4, 1)

    def update(gradient, lr, share=1.0):
        server.optimizer.step(server.params, gradient, state, lr, share)
        server.version += 1

    server.update = update


@pytest.mark.parametrize("rule", few(RULES, "staleness_scaled", "delay_compensated", "with_optimizer(adam(0.01))"))
def test_every_promise_of_a_strategy(rule):
    alone = rule.startswith(("staleness", "delay")) or rule == "momentum_corrected"
    check_strategy(Strategy.parse(f"ps(asynchronous, server_update={rule})"), alone_is_plain=alone)
    check_strategy(Strategy.parse(f"ps(bsp, shards=2, server_update={rule})"), (2,))


# ---- staleness


@pytest.mark.oracle("server_update:staleness_scaled")
@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_each_gradient_counts_with_one_over_its_staleness(n):
    def apply(w, g, tau, backup):
        w -= F(0.1 * (1 / max(1, tau))) * g

    assert equal_bits(served("staleness_scaled", n), oracle(n, apply))


@pytest.mark.oracle("server_update:staleness_scaled")
def test_every_gradient_counts_with_one_over_the_mean_staleness():
    ages = []

    def apply(w, g, tau, backup):
        ages.append(tau)
        w -= F(0.1 * (1 / max(1, sum(ages) / len(ages)))) * g

    assert equal_bits(served("staleness_scaled('mean')"), oracle(4, apply))


@pytest.mark.negative_control("server_update:staleness_scaled")
def test_the_oracle_notices_one_over_staleness_plus_one():
    def apply(w, g, tau, backup):
        w -= F(0.1 / (1 + tau)) * g

    assert not np.allclose(served("staleness_scaled"), oracle(4, apply), rtol=1e-3, atol=1e-3)


def test_a_group_moves_by_the_sum_of_scaled_gradients():
    """w moves by - sum_i alpha(tau_i) g_i / c, for the group's different stalenesses."""
    server = FakeServer(np.zeros(5), version=6)
    gradients = np.random.default_rng(0).normal(size=(3, 5))
    group = [Push(i, 0, version, 0.1, g) for i, (version, g) in enumerate(zip((6, 4, 1), gradients, strict=True))]
    rule = StalenessScaled()
    rule.apply(server, rule.start(server), group)
    assert np.allclose(server.params, -0.1 * (gradients[0] + gradients[1] / 2 + gradients[2] / 5) / 3, rtol=1e-14)
    assert equal_bits(weighted_mean(gradients, [0.5] * 3), gradients.sum(0) / 3)


@pytest.mark.parametrize("optimizer", [MOMENTUM, "adam(lr=0.02)"])
def test_adaptive_optimizers_take_the_shorter_step_too(optimizer):
    """Scaling the gradient would be undone by Adam: the factor is the share of a step that the gradient stands for."""
    job = small_job(optimizer)
    steppers = []

    def apply(w, g, tau, backup):
        if not steppers:
            steppers.append(GradientSource(job=job).stepper(w))
        GradientSource(job=job).engine.optimizer.step(w, g, steppers[0].state, steppers[0].lr, 1 / max(1, tau))

    assert equal_bits(served("staleness_scaled", 8, job), oracle(8, apply, job))


# ---- delay compensation


def dc(form, lambda0):
    square = {}

    def apply(w, g, tau, backup):
        rate = F(lambda0)
        if form == "adaptive":
            square["mean"] = F(0.95) * square.get("mean", np.zeros_like(g)) + F(1 - 0.95) * (g * g)
            rate = F(lambda0) / np.sqrt(square["mean"] + F(1e-7))
        w -= F(0.1) * (g + rate * g * g * (w - backup))

    return apply


@pytest.mark.oracle("server_update:delay_compensated")
@pytest.mark.parametrize(("form", "lambda0"), [("constant", 0.04), ("adaptive", 2.0)])
@pytest.mark.parametrize("n", [2, 5])
def test_equals_the_paper(form, lambda0, n):
    assert equal_bits(served(f"delay_compensated('{form}')", n), oracle(n, dc(form, lambda0)))


@pytest.mark.negative_control("server_update:delay_compensated")
@pytest.mark.parametrize("form", ["constant", "adaptive"])
def test_the_oracle_notices_a_backup_that_is_not_the_workers(form):
    def apply(w, g, tau, backup):
        dc(form, 2.0)(w, g, tau, np.zeros_like(w))

    assert not equal_bits(served(f"delay_compensated('{form}', 2.0)"), oracle(4, apply))


def test_a_group_is_compensated_from_where_each_of_its_workers_read():
    """In one step: each by its own backup, all toward the same w."""
    rule, server = DelayCompensated("constant", 0.5), FakeServer(np.zeros(3), 0)
    state = rule.start(server)
    rule.read(server, state, 0)
    server.params[:], server.version = 1.0, 1
    rule.read(server, state, 1)
    server.params[:], server.version = 3.0, 2
    g = np.array([1.0, -2.0, 0.5])
    rule.apply(server, state, [Push(0, 0, 0, 0.1, g), Push(1, 0, 1, 0.1, 2 * g)])
    expected = ((g + 0.5 * g * g * 3) + (2 * g + 0.5 * 4 * g * g * 2)) / 2
    assert np.allclose(server.params, 3 - 0.1 * expected, rtol=1e-15)


def test_workers_that_read_the_same_version_share_a_backup():
    rule, server = DelayCompensated(), FakeServer(np.zeros(3), 0)
    state = rule.start(server)
    for rank in range(5):
        rule.read(server, state, rank)
    server.params += 1
    server.version += 1
    rule.read(server, state, 4)
    assert len({id(backup) for backup in state.backups.values()}) == 2
    assert not state.backups[0].any()
    assert state.backups[4].all()


# ---- other optimizers, other functions on the server


@pytest.mark.oracle("server_update:with_optimizer")
@pytest.mark.parametrize("shards", [1, 3])
def test_adagrad_on_the_server(shards):
    total = {"s": np.zeros(18, F)}
    grown = []

    def apply(w, g, tau, backup):
        before = total["s"].copy()
        total["s"] = total["s"] + g * g
        grown.append((total["s"] >= before).all())
        w -= g / (np.sqrt(total["s"]) + F(1e-10)) * F(0.05)

    text = f"ps(asynchronous, shards={shards}, server_update=with_optimizer(adagrad(0.05)))"
    run = run_strategy(text, 4, STEPS, network="ideal")
    expected = oracle(4, apply)
    assert np.allclose(run.server, expected, rtol=1e-6, atol=1e-7)
    assert all(grown)
    job = small_job("adagrad(0.05)")
    assert equal_bits(run.server, run_strategy("asgd", 4, STEPS, network="ideal", job=job).server)
    sums = [run.nodes[-1 - i].state.update_state.slots["square_sum"] for i in range(shards)]
    assert np.allclose(np.concatenate(sums), total["s"], rtol=1e-5)


@pytest.mark.negative_control("server_update:with_optimizer")
def test_the_servers_optimizer_is_not_the_jobs():
    own, jobs = served("with_optimizer(adagrad(0.05))"), served("plain")
    assert np.abs(own - jobs).max() > 0.01


@pytest.mark.oracle("server_update:proximal")
def test_the_proximal_step_shrinks_toward_zero():
    def apply(w, g, tau, backup):
        w -= F(0.1) * g
        w[:] = np.sign(w) * np.maximum(np.abs(w) - F(0.1 * 0.2), 0)

    result = served("proximal(0.2)")
    assert np.array_equal(result, oracle(4, apply))
    assert 0 < np.count_nonzero(result) < 18
    assert equal_bits(served("proximal(0)"), served("plain"))


@pytest.mark.negative_control("server_update:proximal")
def test_an_optimum_under_the_penalty_is_known_and_wrong_elsewhere():
    """On the bowl around 1 with curvature h and l1 = 0.3 the optimum is max(0, 1 - 0.3 / h)."""
    job, h = bowl_job("sgd(lr=0.3)", noise=0.0), np.geomspace(1, 0.1, 8)
    w = run_strategy("ps(bsp, server_update=proximal(0.3))", 2, 300, job=job).result
    assert np.allclose(w, np.maximum(0, 1 - 0.3 / h), atol=1e-6)
    assert not np.allclose(w, np.maximum(0, 1 - 0.2 / h), atol=1e-2)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shards", [5])
def test_sharding_changes_no_bit_where_messages_are_atomic(rule, shards):
    whole = run_strategy(f"ps(asynchronous, server_update={rule})", 4, STEPS, network="ideal")
    cut = run_strategy(f"ps(asynchronous, shards={shards}, server_update={rule})", 4, STEPS, network="ideal")
    assert equal_bits(whole.server, cut.server)
    assert equal_bits(whole.replicas, cut.replicas)


# ---- shares of a step


@pytest.mark.parametrize(
    "rule",
    ["plain", "staleness_scaled", "delay_compensated", "proximal(0.01)", "with_optimizer(sgd(lr=0.1))",
     "momentum_corrected", "negative_momentum"],
)  # fmt: skip
@pytest.mark.parametrize("optimizer", ["sgd(lr=0.1)", "sgd(lr=0.1, weight_decay=0.1)"])
def test_every_rule_takes_a_share_of_a_step(rule, optimizer):
    """From rest, a group that stands for 1/4 of a step moves parameters by 1/4 of what a whole step does, at once.

    A whole step is what a group stands for unless it is told otherwise.
    """
    moved, weights = [], []
    for shares in ((), (0.25,)):
        start = np.linspace(1, 2, 5)
        server = FakeServer(start.copy(), 0, Optimizer.parse(optimizer))
        stepping(server)
        chosen = ServerUpdate.parse(rule)
        group = [Push(rank, 0, 0, 0.1, np.full(5, float(rank + 1))) for rank in range(2)]
        weights.append(chosen.apply(server, chosen.start(server), group, *shares))
        moved.append(server.params - start)
        assert server.version == 1
    np.testing.assert_allclose(moved[1], moved[0] / 4, rtol=1e-12)
    assert weights == [[0.5, 0.5], [0.125, 0.125]]


@pytest.mark.parametrize(
    "rule",
    ["plain", "staleness_scaled", "delay_compensated(lambda0=0)", "with_optimizer(sgd(lr=0.1, momentum=0.9))",
     "momentum_corrected", "negative_momentum"],
)  # fmt: skip
def test_a_group_counts_as_its_share_over_all_later_steps(rule):
    """Groups of 3/4 and 1/4 of a step, then steps of zero: displacements, the velocity's included, are as 3 to 1."""
    totals = []
    for shares in ((0.75, 0.25), (0.25, 0.75)):
        server = FakeServer(np.zeros(2), 0, Optimizer.parse("sgd(lr=0.1, momentum=0.9)"))
        stepping(server)
        chosen = ServerUpdate.parse(rule)
        state = chosen.start(server)
        for gradient, share in zip(np.eye(2), shares, strict=True):
            chosen.apply(server, state, [Push(0, 0, server.version, 0.1, gradient)], share)
        for step in range(400):
            chosen.apply(server, state, [Push(0, 0, server.version, 0.1, np.zeros(2))], (0.25, 1.0)[step % 2])
        totals.append(server.params)
    np.testing.assert_allclose(totals[0] / totals[0].sum(), [0.75, 0.25], rtol=1e-9)
    np.testing.assert_allclose(totals[1], totals[0][::-1], rtol=1e-9)


@pytest.mark.oracle("server_update:staleness_scaled")
@pytest.mark.parametrize("known", [0.5, 1, 4])
def test_a_known_mean_staleness_divides_every_step(known):
    """alpha_0 / n from the first step on (Gupta, Zhang & Wang 2016, section 3.2), as a smaller alpha_0 would."""
    job = small_job("sgd(lr=0.08)")
    scaled = run_strategy(
        f"ps(asynchronous, server_update=staleness_scaled(mean, known={known}))", 4, STEPS, job=job
    ).result
    smaller = run_strategy("ps(asynchronous)", 4, STEPS, job=small_job(f"sgd(lr={0.08 / max(1, known)})")).result
    assert np.allclose(scaled, smaller, rtol=1e-6)
    if known > 1:
        assert not np.allclose(scaled, run_strategy("ps(asynchronous)", 4, STEPS, job=job).result, rtol=1e-3)


@pytest.mark.parametrize("update", ["plain", "staleness_scaled", "negative_momentum(0.0)", "delay_compensated"])
def test_gradients_of_different_rates_make_a_step_of_their_mean_rate(update: str) -> None:
    """Under softsync the gradients of one step are of different steps of a schedule."""
    source = GradientSource()
    server = Server(0, Cluster(2, 1), source.start(), np.random.default_rng(0), Optimizer.parse("sgd(lr=0.1)"))
    rule, before, gradients = ServerUpdate.parse(update), server.params.copy(), []
    state = rule.start(server)
    for rank in range(2):
        rule.read(server, state, rank)
        gradients.append(np.random.default_rng(rank).normal(size=len(before)).astype(before.dtype))
    rule.apply(server, state, [Push(rank, 0, 0, rate, gradients[rank]) for rank, rate in enumerate([0.1, 0.3])])
    np.testing.assert_allclose(server.params, before - 0.2 * (gradients[0] + gradients[1]) / 2, rtol=1e-5)
