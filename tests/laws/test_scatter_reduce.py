"""Slices served by the workers: the parameter server's trajectory, bytes, and what an owner keeps."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from flockstep.arrays.schema import slices
from flockstep.codecs.half import Half
from flockstep.errors import CompositionError
from flockstep.feedback.residual import Residual
from flockstep.records.events import UpdateEvent
from flockstep.simulation.compute import ComputeModel
from flockstep.strategies.scatter_reduce import ScatterReduce
from flockstep.strategies.slice_servers import SliceServers
from flockstep.testing.strategies import COMPUTE, GradientSource, Sent, equal_bits, run_strategy, small_job
from support.matrix import few

STEPS = 15
OPTIMIZERS = ["sgd(lr=0.1)", "sgd(lr=0.1, momentum=0.9, weight_decay=0.01)", "adam(lr=0.02)"]


def oracle(n, optimizer, steps=STEPS, codec=None):
    """One model and one optimizer; every step takes the mean gradient, summed in order of rank."""
    source = GradientSource(n, small_job(optimizer))
    w = source.start()
    stepper = source.stepper(w)
    for _ in range(steps):
        gradients = [source.gradient(rank, w) for rank in range(n)]
        if codec is not None:
            gradients = [codec.decode(codec.encode(g, np.random.default_rng()), g.size, g.dtype) for g in gradients]
        stepper.step(w, sum(gradients[1:], gradients[0]) / w.dtype.type(n))
    return w


@pytest.mark.oracle("strategy:scatter_reduce")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 18, 20])
def test_a_sharded_optimizer_is_the_whole_one(optimizer, n):
    """Also with more workers than parameters, where some serve nothing."""
    run = run_strategy("scatter_reduce", n, STEPS, job=small_job(optimizer))
    assert equal_bits(run.result, *run.replicas, oracle(n, optimizer))


@pytest.mark.oracle("strategy:scatter_reduce")
@pytest.mark.parametrize("n", [2, 4])
def test_half_precision_gradients_equal_the_oracle(n):
    run = run_strategy("scatter_reduce(half)", n, STEPS)
    assert equal_bits(*run.replicas, oracle(n, "sgd(lr=0.1)", codec=Half()))
    assert not equal_bits(run.result, oracle(n, "sgd(lr=0.1)"))


@pytest.mark.parametrize("arguments", ["", "codec=half", "codec=half, feedback=residual"])
@pytest.mark.parametrize("n", [1, 3, 4])
def test_equals_a_parameter_server_of_n_shards(arguments, n):
    job = small_job("adam(lr=0.02)")
    ours = run_strategy(f"scatter_reduce({arguments})", n, STEPS, job=job)
    theirs = run_strategy(f"ps(bsp, {n}{', ' if arguments else ''}{arguments})", n, STEPS, job=job)
    assert equal_bits(ours.result, theirs.result)


@pytest.mark.parametrize("n", few([2, 3, 6, 7, 18, 20], 3, 7, 20))
def test_bytes_are_exact(n):
    run = run_strategy("scatter_reduce", n, STEPS)
    totals = [run.totals[rank] for rank in range(n)]
    sizes = [part.stop - part.start for part in slices(18, n)]
    assert sum(b.sent_bytes for b in totals) == sum(b.received_bytes for b in totals) == STEPS * 2 * (n - 1) * 18 * 4
    for rank, b in enumerate(totals):
        assert b.sent_bytes == STEPS * 4 * (18 - sizes[rank] + (n - 1) * sizes[rank])
        assert b.messages_sent == b.messages_received == STEPS * 2 * (n - 1)
        if 18 % n == 0:
            assert b.sent_bytes == b.received_bytes == STEPS * 2 * (n - 1) * 18 // n * 4
    half = run_strategy("scatter_reduce(half)", n, STEPS)
    assert sum(b.sent_bytes for b in half.totals.values()) == STEPS * (n - 1) * 18 * (2 + 4)


def test_a_codec_that_may_diverge_is_refused():
    class Unsafe(Half):
        contraction = False

    with pytest.raises(CompositionError, match="contraction"):
        ScatterReduce(Unsafe(), Residual())


class FreshOptimizer(ScatterReduce):
    """Negative control: an owner forgets its slice's optimizer state at every step."""

    async def _piece(self, me, rank):
        me.state.optimizer = me.optimizer.init(me.params[slices(len(me.params), me.workers)[me.rank]])
        return await super()._piece(me, rank)


@pytest.mark.negative_control("strategy:scatter_reduce")
def test_the_oracle_notices_a_forgotten_optimizer_state():
    for optimizer, same in (("sgd(lr=0.1)", True), ("sgd(lr=0.1, momentum=0.9)", False)):
        run = run_strategy(FreshOptimizer(), 3, STEPS, job=small_job(optimizer))
        assert equal_bits(run.result, oracle(3, optimizer)) == same


def served(n, optimizer="sgd(lr=0.1)", steps=STEPS):
    """What asynchronous servers make of w, and each update's lateness, where messages take no time: in order of
    completion, a gradient of the parameters as they were after its worker's last one."""
    source = GradientSource(n, small_job(optimizer))
    w = source.start()
    stepper = source.stepper(w)
    streams = [ComputeModel.parse(COMPUTE).stream(0, rank) for rank in range(n)]
    due = [(next(stream), rank) for rank, stream in enumerate(streams)]
    read, left, versions, late = [w.copy()] * n, [steps] * n, [0] * n, []
    for version in range(n * steps):
        now, rank = min(due)
        stepper.step(w, source.gradient(rank, read[rank]))
        late.append((rank, version - versions[rank]))
        read[rank], versions[rank] = w.copy(), version + 1
        left[rank] -= 1
        due.remove((now, rank))
        if left[rank]:
            due.append((now + next(streams[rank]), rank))
    return w, late


@pytest.mark.oracle("strategy:slice_servers")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("n", [1, 2, 5, 20])
def test_slice_servers_equal_one_asynchronous_server(n, optimizer):
    run = run_strategy("slice_servers", n, STEPS, job=small_job(optimizer), network="ideal")
    w, late = served(n, optimizer)
    assert equal_bits(*run.replicas, w)
    for owner in range(n):
        seen = [(e.source, e.staleness) for e in run.of(UpdateEvent) if e.node == owner]
        assert seen == late
    assert {e.weight for e in run.of(UpdateEvent)} == {1.0}


@pytest.mark.parametrize("n", [2, 4, 7])
def test_slice_servers_answer_every_push_and_end_with_one_model(n):
    """A step is a push of each foreign slice and its answer; in the end everyone broadcasts its own once more."""
    run = run_strategy("slice_servers", n, STEPS)
    assert equal_bits(*run.replicas)
    assert sum(b.sent_bytes for b in run.totals.values()) == (2 * STEPS + 1) * (n - 1) * 18 * 4
    pushes = [s for s in run.simulation.log if isinstance(s, Sent) and s.message.tag.startswith("push")]
    assert Counter(bool(s.message.reply_to) for s in pushes) == {
        False: n * (n - 1) * (STEPS + 1),
        True: n * (n - 1) * STEPS,
    }
    assert set(run.deliveries().values()) == {STEPS}


class SkipsOwn(SliceServers):
    """Negative control: an owner leaves its own gradient out."""

    async def _exchange(self, me, gradient):
        await super()._exchange(me, gradient * (np.arange(18) // -(-18 // me.workers) != me.rank))


@pytest.mark.negative_control("strategy:slice_servers")
def test_the_oracle_notices_an_owner_that_skips_itself():
    run = run_strategy(SkipsOwn(), 3, STEPS, network="ideal")
    assert not equal_bits(run.result, served(3)[0])
    assert equal_bits(run_strategy("slice_servers", 3, STEPS, network="ideal").result, served(3)[0])
