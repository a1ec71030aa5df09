"""Gradients as factors: the dense gradient they stand for, the choice, the bytes, and whom they are refused to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from flockstep.arrays.factors import FactoredWeight, Packing
from flockstep.arrays.schema import slices
from flockstep.errors import CompositionError, ConfigurationError, ProtocolError
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.numpy import SoftmaxRegression
from flockstep.frameworks.torch import TorchEngine
from flockstep.links.wire import SenderIdentity, decode, encode
from flockstep.messages import MASTER, Message, server
from flockstep.strategies.sufficient_factors import SufficientFactors
from flockstep.strategies.sufficient_factors_server import Factored, FactorServer, unpacked
from flockstep.testing.strategies import GradientSource, bowl_job, equal_bits, run_strategy, small_job

STEPS = 8
FEATURES, CLASSES, BATCH = 30, 20, 4
MATRIX, FACTORS = FEATURES * CLASSES, BATCH * (FEATURES + CLASSES)


def wide_job(optimizer="sgd(lr=0.1)", dtype="float64", l2=0.0):
    """Softmax regression that is wide enough for factors: 600 elements as a matrix, 200 as factors."""

    def data():
        random = np.random.default_rng(7)
        y = random.integers(0, CLASSES, 120)
        x = random.normal(size=(CLASSES, FEATURES))[y] + random.normal(size=(120, FEATURES))
        return Data(x[:100], y[:100], x[100:], y[100:])

    return Job(lambda: SoftmaxRegression(FEATURES, CLASSES, l2, dtype), data, optimizer, batch=BATCH)


def oracle(n, job, steps=STEPS):
    """Synchronous SGD with gradients from numpy: the sum of outer products of every sample, one after the other."""
    source = GradientSource(n, job)
    w, data = source.start(), job.data()
    stepper = source.stepper(w)
    samplers = GradientSource(n, job)._samplers
    for _ in range(steps):
        total = np.zeros_like(w)
        weight, bias = total[:MATRIX].reshape(FEATURES, CLASSES), total[MATRIX:]
        for rank in range(n):
            for i in samplers[rank].next():
                logits = data.train_x[i] @ w[:MATRIX].reshape(FEATURES, CLASSES) + w[MATRIX:]
                error = np.exp(logits) / np.exp(logits).sum() - np.eye(CLASSES)[data.train_y[i]]
                weight += np.outer(data.train_x[i], error) / (BATCH * n)
                bias += error / (BATCH * n)
        stepper.step(w, total)
    return w


@pytest.mark.oracle("strategy:sufficient_factors", "strategy:factor_server")
@pytest.mark.parametrize("optimizer", ["sgd(lr=0.1, momentum=0.9)", "adam(lr=0.02)"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_sums_of_outer_products_are_the_dense_gradient(optimizer, n):
    job = wide_job(optimizer)
    for strategy in ("sufficient_factors", "factor_server(bsp)", "factor_server(bsp, shards=3)"):
        run = run_strategy(strategy, n, STEPS, job=job)
        assert equal_bits(*run.replicas)
        assert np.allclose(run.result, oracle(n, job), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8])
def test_the_choice_is_the_smaller_number_of_bytes(n):
    """Both ways counted on the wire: whoever chooses factors sends no more than a ring would."""
    job = wide_job()
    sent = [run_strategy(s, n, STEPS, job=job).totals for s in ("sufficient_factors", "all_reduce")]
    ours, ring = (sum(totals.sent_bytes for totals in totals.values()) for totals in sent)
    as_factors = n * (n - 1) * FACTORS + 2 * (n - 1) * CLASSES
    assert ring == STEPS * 8 * 2 * (n - 1) * (MATRIX + CLASSES)
    assert ours == STEPS * 8 * min(as_factors, 2 * (n - 1) * (MATRIX + CLASSES))
    assert (ours < ring) == (n * FACTORS < 2 * MATRIX)


def test_a_server_is_sent_factors_where_they_are_smaller_and_answers_with_everything():
    run = run_strategy("factor_server", 4, STEPS, job=wide_job())
    totals = run.totals[MASTER]
    assert totals.received_bytes == 4 * STEPS * 8 * (FACTORS + CLASSES)
    assert totals.sent_bytes == 4 * STEPS * 8 * (MATRIX + CLASSES)
    narrow = run_strategy("factor_server", 4, STEPS).totals[MASTER]
    assert narrow.received_bytes == narrow.sent_bytes == 4 * STEPS * 18 * 4


@pytest.mark.parametrize("shards", [2, 3, 4])
def test_a_shard_is_sent_the_rows_that_it_holds(shards):
    """Whole rows as factors, where that is smaller, and those that a cut goes through as they are."""
    run = run_strategy(f"factor_server(shards={shards})", 2, STEPS, job=wide_job())
    parts = slices(MATRIX + CLASSES, shards)
    for i, part in enumerate(parts):
        rows = min(part.stop, MATRIX) // CLASSES - -(-part.start // CLASSES)
        as_factors = BATCH * (rows + CLASSES)
        spared = rows * CLASSES - as_factors if rows > 0 and as_factors < rows * CLASSES else 0
        assert run.totals[server(i)].received_bytes == 2 * STEPS * 8 * (part.stop - part.start - spared)
    assert any(run.totals[server(i)].received_bytes < run.totals[server(i)].sent_bytes for i in range(min(shards, 3)))


def test_rows_of_a_layer_within_a_part():
    layer = FactoredWeight(10, 4, 5, 2)
    assert layer.within(slice(0, 40)) == (FactoredWeight(10, 4, 5, 2), slice(0, 4))
    assert layer.within(slice(12, 40)) == (FactoredWeight(3, 3, 5, 2), slice(1, 4))
    assert layer.within(slice(15, 26)) == (FactoredWeight(0, 2, 5, 2), slice(1, 3))
    for part in (slice(0, 10), slice(0, 14), slice(16, 24), slice(30, 40)):
        assert layer.within(part) is None


def test_what_has_no_factors_is_refused():
    for job in (bowl_job(), wide_job(l2=0.1)):
        for strategy in ("sufficient_factors", "factor_server"):
            with pytest.raises(CompositionError, match="no layer that can be factored"):
                run_strategy(strategy, 2, STEPS, job=job)
    for text in ("factor_server(essp)", "factor_server(backup(1))", "factor_server(codec=half)"):
        with pytest.raises(CompositionError, match="use ps"):
            FactorServer.parse(text)
    assert SufficientFactors().traits.needs_job
    assert FactorServer().traits.needs_job


def test_packing_is_undone():
    random = np.random.default_rng(0)
    layers = [FactoredWeight(15, 2, 3, 4), FactoredWeight(3, 4, 3, 2)]
    packing = Packing(23, layers)
    assert (packing.rest, packing.size) == (23 - 6 - 12, 5 + 2 * 7 + 4 * 5)
    dense = random.normal(size=23)
    factors = [
        (random.normal(size=(2, 4)), random.normal(size=(2, 3))),
        (random.normal(size=(4, 2)), random.normal(size=(4, 3))),
    ]
    out = np.empty(50)
    packing.pack(dense, factors, out)
    expected = dense.copy()
    expected[3:15] = (factors[0][0].T @ factors[0][1]).ravel()
    expected[15:21] = (factors[1][0].T @ factors[1][1]).ravel()
    assert equal_bits(packing.dense(out[: packing.size]), expected)
    for wrong, rule in (
        ([FactoredWeight(0, 2, 2, 1), FactoredWeight(3, 1, 1, 1)], "overlaps another layer or is empty"),
        ([FactoredWeight(20, 2, 2, 1)], "must lie within the 23 elements"),
        ([FactoredWeight(0, 0, 2, 1)], "overlaps another layer or is empty"),
    ):
        with pytest.raises(ConfigurationError, match=rule):
            Packing(23, wrong)


@pytest.mark.parametrize("layer", [(22, 2, 2, 1), (0, 2, 2, 2)])
def test_factors_that_do_not_fit_are_refused(layer):
    with pytest.raises(ProtocolError, match="worker 1 sent"):
        unpacked(Message(1, "push", np.zeros(7), Factored(0, 0.1, [layer])), 23)


@pytest.mark.parametrize("layer", [[0, 2, 2], [0, 2, 2, "x"]])
def test_a_push_whose_layers_are_no_rectangles_is_refused(layer):
    peer, me = (SenderIdentity("run", address, "s", 100, notes=FactorServer.notes) for address in (1, 2))
    header = encode(Message(1, "push", None, {"version": 0, "lr": 0.1, "layers": [layer]}, number=1), peer)
    with pytest.raises(ProtocolError, match=r"worker 1 sent 'push' with a note that is not of type Factored: .*layers"):
        decode(header, None, 1, me)


class Twice(nn.Module):
    """One layer used twice with its result changed in place, one whose weight is used elsewhere, and a convolution."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 1)
        self.twice, self.tied, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.3)
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 3, bias=False)

    def forward(self, x):
        x = self.conv(x[:, None]).mean(1)
        x = self.twice(torch.relu_(self.twice(x)))
        x = self.drop(self.norm(self.tied(x))) @ self.tied.weight
        return self.last(x)


def torch_job(model):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(40, 8)), random.integers(0, 3, 40)
    return Job(model, lambda: Data(x[:32], y[:32], x[32:], y[32:]), "sgd(lr=0.1)", nn.functional.cross_entropy, batch=4)


def test_torch_layers_are_those_that_a_trial_confirms():
    engine = TorchEngine(torch_job(Twice), 0)
    before = engine.buffers(0).copy(), engine.params.copy()
    names = {entry.offset: entry.name for entry in engine.schema.entries}
    found = {names[layer.offset]: layer.products for layer in engine.layers(4)}
    assert found == {"twice.weight": 8, "last.weight": 4}
    assert equal_bits(before[0], engine.buffers(0))
    assert equal_bits(before[1], engine.params)
    indices, dense, packed = np.arange(4, 8), np.empty(engine.schema.size, np.float32), np.empty(1000, np.float32)
    layers = engine.layers(4)
    loss = engine.gradient(engine.initial(), indices, dense, 1, 5)
    engine.restore_buffers(1, before[0])
    assert engine.factored(engine.initial(), indices, layers, packed, 1, 5) == loss
    packing = Packing(engine.schema.size, layers)
    assert np.allclose(packing.dense(packed[: packing.size]), dense, rtol=1e-4, atol=1e-6)


class LosesOne(SufficientFactors):
    """Negative control: everyone adds up the products of all workers but the last."""

    async def worker(self, me):
        receive = me.receive

        async def tampered(tag=None, source=None):
            message = await receive(tag, source)
            if tag == "factors" and source == me.workers - 1:
                message.array = message.array * 0
            return message

        me.receive = tampered
        await super().worker(me)


@pytest.mark.negative_control("strategy:sufficient_factors", "strategy:factor_server")
def test_the_oracle_notices_a_missing_product():
    job = wide_job()
    assert not np.allclose(run_strategy(LosesOne(), 3, STEPS, job=job).replicas[0], oracle(3, job), rtol=1e-3)


def test_small_models_send_no_factors():
    assert SufficientFactors().chosen((FactoredWeight(0, 5, 3, 8),), 2) == ()
    assert SufficientFactors().chosen((FactoredWeight(0, 100, 100, 10),), 1) == ()
    assert SufficientFactors().chosen((FactoredWeight(0, 100, 100, 10),), 10) == (FactoredWeight(0, 100, 100, 10),)
    assert SufficientFactors().chosen((FactoredWeight(0, 100, 100, 10),), 11) == ()
    assert equal_bits(*run_strategy("sufficient_factors", 3, STEPS, job=small_job()).replicas)
