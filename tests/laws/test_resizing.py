"""The rules by which a run goes on with another number of workers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from flockstep import registry
from flockstep.arrays.schema import slices
from flockstep.errors import CompositionError
from flockstep.messages import MASTER
from flockstep.nodes import Worker
from flockstep.programs import NeedGradient
from flockstep.runtime.node_metrics import NodeMetrics
from flockstep.runtime.plan import FIRST_BATCH, Batches, Plan
from flockstep.runtime.resizing import faults_after, resized, resized_checkpoint
from flockstep.simulation.attacks import Memory
from flockstep.simulation.faults import Fault
from flockstep.strategies.base import Strategy
from flockstep.strategies.elastic_averaging import ElasticAveraging
from flockstep.strategies.gossip import TOTAL_MASS, Gossip
from flockstep.strategies.gradient_push import UNIT
from flockstep.strategies.resizing import Resizing
from flockstep.testing.strategies import GradientSource, SimulatedRun, equal_bits, run_strategy, small_job
from flockstep.workloads.sampler import Sampler, SamplerState
from support.matrix import few

MOMENTUM = "sgd(lr=0.1, momentum=0.9)"
VARIANTS = [
    "asgd",
    "ps(ssp(2), shards=3)",
    "ps(backup(1))",
    "ps(codec=topk(0.3), feedback=residual)",
    "local_sgd(4, outer_optimizer=nesterov)",
    "local_sgd(4, outer_optimizer=bmuf)",
    "sparta(0.1, full=local_sgd(4, outer_optimizer=nesterov))",
    "partial(rest='drop')",
    "sgp(tau=2)",
    "adpsgd(topology=star)",
    "gradient_coding(scheme=cyclic)",
    "all_reduce(codec=topk(0.3), feedback=residual)",
    "scatter_reduce(codec=half, feedback=residual)",
]


def resizable(text: str) -> bool:
    strategy = Strategy.parse(text)
    return strategy.traits.checkpoints and strategy.traits.restarts and not strategy.resizing.refused


ALL = [*filter(resizable, registry.names("strategy")), *VARIANTS]


def changed(
    strategy: Strategy | str, workers: int, to: int, steps: int = 7, before: int = 5, optimizer: str = MOMENTUM
) -> tuple[SimulatedRun, dict[int, Any], Plan]:
    """A run of `workers` workers, the states of `to` workers that go on with it, and their plan."""
    job = small_job(optimizer)
    run = run_strategy(strategy, workers, steps, job=job)
    rule = run.simulation.plan.strategy
    rule.check(to)
    source = GradientSource(to, job, 0)
    plan = replace(run.simulation.plan, cluster=rule.cluster(to), parts=source.parts)
    return run, resized(source.engine, plan, run.simulation.save(), before), plan


def mean(states: dict[int, Any]) -> Any:
    """Mean of the replicas."""
    return np.mean([one.params for rank, one in states.items() if rank >= 0], axis=0, dtype=np.float64)


@pytest.mark.parametrize("text", few(ALL, "all_reduce", "asgd", "gossip", "scatter_reduce", "streaming_diloco"))
def test_a_run_goes_on_with_fewer_and_with_more_workers(text: str) -> None:
    """Replicas that were equal in every bit stay so: newcomers have what the others have."""
    for workers, to in ((4, 2), (4, 6), (1, 2)):
        try:
            run, states, _ = changed(text, workers, to)
        except CompositionError:
            continue
        again = run_strategy(text, to, 6, job=small_job(MOMENTUM), resume=states)
        assert again.deliveries() is not None
        assert all(runner.done for runner in again.simulation.runners.values())
        assert np.isfinite(again.replicas).all()
        alike = run.simulation.plan.strategy.traits.delivery == "synchronous"
        assert not alike or all(equal_bits(again.replicas[0], one) for one in again.replicas)


def test_new_workers_of_synchronous_strategies_need_the_optimizer_of_the_others() -> None:
    """Negative control of the test above: with an empty momentum their replicas differ."""
    _, states, _ = changed("all_reduce", 4, 6)
    for slot in states[5].optimizer.slots.values():
        slot[:] = 0
    again = run_strategy("all_reduce", 6, 6, job=small_job(MOMENTUM), resume=states)
    assert not equal_bits(again.replicas[0], again.replicas[5])


@pytest.mark.parametrize("text", ["dpsgd", "local_sgd(10)", "mpca", "tree_easgd"])
@pytest.mark.parametrize("to", [2, 3, 6])
def test_the_mean_of_the_replicas_is_kept(text: str, to: int) -> None:
    run, states, _ = changed(text, 4, to)
    assert np.abs(mean(states) - run.replicas.mean(0, dtype=np.float64)).max() < 1e-6
    if to > 4:
        assert all(equal_bits(states[rank].params, run.replicas[rank]) for rank in range(4))
        return
    shift = states[0].params - run.replicas[0]
    assert all(np.abs(states[r].params - run.replicas[r] - shift).max() < 1e-6 for r in range(to))
    assert np.abs(run.replicas[:to].mean(0) - run.replicas.mean(0)).max() > 1e-4, "who leaves changes the mean"


def test_the_mass_of_gossip_is_kept_exactly_and_with_it_the_weighted_mean() -> None:
    for to in (2, 3, 7):
        run, states, _ = changed("gossip(0.5)", 4, to)
        masses = np.array([run.nodes[rank].state.mass for rank in range(4)]) / TOTAL_MASS
        assert sum(states[rank].state.mass for rank in range(to)) == TOTAL_MASS
        assert max(states[rank].state.mass for rank in range(to)) - TOTAL_MASS // to <= 1
        assert np.abs(mean(states) - masses @ run.replicas).max() < 1e-6
        assert np.abs(run.replicas.mean(0) - masses @ run.replicas).max() > 1e-3


class Unweighted(Gossip):
    """Negative control: a rule that forgets the masses."""

    def replica(self, former: Any) -> Any:
        return former.params, 1.0


def test_a_rule_that_forgets_the_masses_is_caught() -> None:
    run, states, _ = changed(Unweighted(0.5), 4, 3)
    masses = np.array([run.nodes[rank].state.mass for rank in range(4)]) / TOTAL_MASS
    assert np.abs(mean(states) - masses @ run.replicas).max() > 1e-3


def test_push_sum_goes_on_with_mass_one_each_at_the_mean_of_all_mass() -> None:
    for to in (2, 6):
        run, states, _ = changed("sgp", 4, to)
        x = sum(run.nodes[rank].state.x for rank in range(4))
        omega = sum(run.nodes[rank].state.mass for rank in range(4)) / UNIT
        assert [states[rank].state.mass for rank in range(to)] == [UNIT] * to
        assert all(equal_bits(states[rank].state.x, states[rank].params) for rank in range(to))
        assert np.abs(mean(states) - x / omega).max() < 1e-6


class FromTheMean(ElasticAveraging):
    """Negative control: all replicas begin at the center."""

    resizing = Resizing()


def test_the_center_of_elastic_averaging_and_the_remaining_replicas_keep_every_bit() -> None:
    for to in (2, 6):
        run, states, _ = changed("easgd(4)", 4, to)
        center = run.nodes[MASTER].params
        assert equal_bits(states[MASTER].params, center)
        assert all(equal_bits(states[rank].params, run.replicas[rank]) for rank in range(min(to, 4)))
        assert all(equal_bits(states[rank].params, center) for rank in range(4, to))
    run, states, _ = changed(FromTheMean(4), 4, 2)
    assert not equal_bits(states[0].params, run.replicas[0])


def test_servers_keep_parameters_and_optimizer_and_wait_for_the_workers_there_are() -> None:
    run, states, _ = changed("ps(bsp, shards=3)", 4, 6)
    for index in (-1, -2, -3):
        node, saved = run.nodes[index], states[index]
        assert equal_bits(saved.params, node.params)
        assert saved.optimizer.steps == node.optimizer_state.steps == 7
        assert equal_bits(saved.optimizer.slots["momentum"], node.optimizer_state.slots["momentum"])
        assert saved.state.clocks == dict.fromkeys(range(6), 0)
    again = run_strategy("ps(bsp, shards=3)", 6, 3, job=small_job(MOMENTUM), resume=states)
    assert [again.nodes[i].optimizer_state.steps for i in (-1, -2, -3)] == [10] * 3


def test_slices_of_an_optimizer_are_cut_anew() -> None:
    for to in (3, 5):
        run, states, _ = changed("scatter_reduce", 4, to)
        whole = np.concatenate([run.nodes[rank].state.optimizer.slots["momentum"] for rank in range(4)])
        for rank, part in enumerate(slices(len(whole), to)):
            made = states[rank].state.optimizer
            assert equal_bits(made.slots["momentum"], whole[part])
            assert (made.steps, made.start) == (7, part.start)
        assert whole.any()


def test_remaining_workers_keep_what_their_codec_dropped() -> None:
    run, states, _ = changed("all_reduce(codec=topk(0.3), feedback=residual)", 4, 6)
    for rank in range(4):
        assert equal_bits(states[rank].state.memory, run.nodes[rank].state.memory)
        assert run.nodes[rank].state.memory.any()
    assert states[4].state.memory is None


def test_the_outer_optimizer_goes_on_and_block_momentum_follows_the_number_of_workers() -> None:
    run, states, _ = changed("local_sgd(4, outer_optimizer=bmuf)", 4, 6)
    for rank in range(6):
        made, old = states[rank].state, run.nodes[0].state
        assert equal_bits(made.model, old.model)
        assert equal_bits(made.outer_state.change, old.outer_state.change)
        assert (old.outer_state.momentum, made.outer_state.momentum) == (1 - 1 / 4, 1 - 1 / 6)
    run, states, _ = changed("local_sgd(4, outer_optimizer=bmuf(nesterov=True))", 2, 3, steps=8)
    assert equal_bits(states[0].params, run.nodes[0].state.model), "not the result that was taken at the end"
    assert not equal_bits(states[0].params, run.replicas[0])


@pytest.mark.parametrize("text", few([*ALL, "bucketed(accumulate=3)"], "all_reduce", "bucketed(accumulate=3)"))
def test_strategies_whose_workers_step_at_the_end_say_so(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's number of workers cannot change under them."""
    rule, ending, late = Strategy.parse(text), set[int](), list[int]()
    finish, step = type(rule).finish, Worker.optimizer_step

    async def finishing(self: Strategy, me: Worker) -> None:
        ending.add(me.rank)
        await finish(self, me)

    def stepping(self: Worker, *arguments: Any, **names: Any) -> None:
        if self.rank in ending:
            late.append(self.rank)
        step(self, *arguments, **names)

    monkeypatch.setattr(type(rule), "finish", finishing)
    monkeypatch.setattr(Worker, "optimizer_step", stepping)
    run_strategy(rule, 4, 7, job=small_job())
    assert ending == {0, 1, 2, 3}
    assert bool(late) == rule.resizing.steps_at_end


@pytest.mark.parametrize("text", ["ensemble", "codistillation"])
def test_strategies_whose_workers_train_separate_models_refuse(text: str) -> None:
    said = (
        f"a run with {text} cannot continue with another number of workers, because each worker trains a separate model"
    )
    with pytest.raises(CompositionError, match=said):
        changed(text, 4, 3)


def test_batches_go_on_in_permutations_that_no_worker_has_read() -> None:
    _, states, plan = changed("all_reduce", 4, 3, before=9)
    batches = Batches(plan, 1)
    batches.restore(states[1].batches)
    first = SamplerState(1)
    assert states[1].batches == {FIRST_BATCH: (first, 9)}
    expected = Sampler(plan.parts[1], plan.batch, plan.seed, 1)
    expected.restore(first)
    firsts = [expected.next().tolist() for _ in range(3)]
    assert [batches.next(NeedGradient()).tolist() for _ in range(2)] == firsts[:2]
    assert batches.next(NeedGradient(block=1, turn=2)).tolist() == firsts[2]
    other = Batches(plan, 0)
    other.restore(batches.state())
    assert other.next(NeedGradient(block=1, turn=0)).tolist() == firsts[0], "turns count from the change"
    assert firsts[0] != Sampler(plan.parts[1], plan.batch, plan.seed, 1).next().tolist()


def test_strikes_follow_a_worker_to_its_new_rank() -> None:
    """Worker 0 leaves, and worker 2, whose gradients were refused, becomes worker 1."""
    run = run_strategy("asgd", 3, 7)
    engine, plan = GradientSource(3, small_job(), 0).engine, run.simulation.plan
    now = replace(plan, cluster=plan.strategy.cluster(2), parts=GradientSource(2, small_job(), 0).parts)
    kept = {
        address: msgspec.structs.replace(saved, totals=NodeMetrics(address, None).kept(), strikes=Counter({2: 2}))
        for address, saved in run.simulation.save().items()
    }
    states = resized_checkpoint(engine, plan, now, kept, [1, 2, 0])
    assert set(states) == {0, 1, MASTER}
    assert all(one.strikes == Counter({1: 2}) for one in states.values())


def test_injected_faults_follow_a_worker_to_its_new_rank() -> None:
    """Worker 0 leaves. Worker 2, whose gradients are wrong, becomes worker 1; a fault that is over is dropped."""
    texts = [
        "flips_sign(0)",
        "enlarges(2, begin=1, end=4)",
        "little_is_enough(2, begin=3)",
        "enlarges(2, begin=9, end=12)",
    ]
    run = run_strategy("asgd", 3, 7)
    engine, plan = GradientSource(3, small_job(), 0).engine, run.simulation.plan
    plan = replace(plan, faults=tuple(map(Fault.parse, texts)))
    saved = run.simulation.save()
    memories: dict[int, list[Memory]] = {0: [{}], 2: [{}, {"mean": np.ones(2)}, {}]}
    kept = {
        address: msgspec.structs.replace(
            one, totals=NodeMetrics(address, None).kept(), memories=memories.get(address, [])
        )
        for address, one in saved.items()
    }
    assert saved[2].step == 7
    faults = faults_after(plan, kept, [1, 2, 0], 2)
    assert list(map(Fault.parse, faults)) == list(
        map(Fault.parse, ["little_is_enough(1)", "enlarges(1, begin=2, end=5)"])
    )
    now = replace(plan, cluster=plan.strategy.cluster(2), parts=GradientSource(2, small_job(), 0).parts)
    states = resized_checkpoint(engine, plan, now, kept, [1, 2, 0])
    assert [states[rank].memories for rank in (0, 1)] == [[], [memories[2][1], {}]]
    assert faults_after(plan, kept, [0, 1, 2], 2) == ("flips_sign(worker=0)",)
