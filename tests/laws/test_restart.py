"""Stopped at a step boundary and restarted from what was saved: nothing is forgotten."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, fields, is_dataclass, replace

import msgspec
import numpy as np
import pytest

from flockstep import registry
from flockstep.errors import FlockstepError
from flockstep.nodes import Server
from flockstep.records.events import StepEvent
from flockstep.strategies.broadcast import Broadcast
from flockstep.strategies.gossip import TOTAL_MASS
from flockstep.strategies.local_sgd import LocalSGD
from flockstep.strategies.overlap_local_sgd import OverlapLocalSGD
from flockstep.testing.strategies import GradientSource, Watched, bowl_job, equal_bits, run_strategy, small_job

OPTIMIZERS = ["sgd(lr=0.1)", "sgd(lr=0.1, momentum=0.9)", "adam(lr=0.02)"]
DETERMINED = [
    "all_reduce",
    "all_reduce(recursive_doubling)",
    "bsp",
    "ps(ssp(0), shards=3)",
    "ps(codec=half, feedback=residual)",
    "local_sgd(4)",
    "dpsgd",
    "dpsgd(complete)",
]
"""Their results do not depend on times."""
ALONE = ["asgd", "ps(ssp(2))", "ps(asynchronous, 3, half, residual)", "easgd(4)", "gossip(1)", "broadcast", "partial"]


def restarted(strategy, workers, stops, **options):
    """A run up to each of `stops` in turn, every one from what the one before saved."""
    run = run_strategy(strategy, workers, stops[0], **options)
    for steps in stops[1:]:
        run = run_strategy(strategy, workers, steps, resume=run.simulation.save(), **options)
    return run


def same(one, other):
    """Parameters, optimizers, versions and steps of all nodes are equal."""
    first, second = one.simulation.save(), other.simulation.save()
    for address, saved in first.items():
        again = second[address]
        assert equal_bits(saved.params, again.params), address
        assert (saved.step, saved.version, saved.random) == (again.step, again.version, again.random), address
        assert saved.batches == again.batches
        assert saved.optimizer.steps == again.optimizer.steps
        for name, slot in saved.optimizer.slots.items():
            assert equal_bits(slot, again.optimizer.slots[name]), (address, name)
    return True


@pytest.mark.parametrize("strategy", DETERMINED)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_restart_changes_no_bit_where_time_does_not(strategy, optimizer):
    job = small_job(optimizer)
    whole = run_strategy(strategy, 4, 18, job=job)
    assert same(whole, restarted(strategy, 4, (9, 18), job=job))
    assert same(whole, restarted(strategy, 4, (1, 2, 7, 17, 18), job=job))


@pytest.mark.parametrize("strategy", [*DETERMINED, *ALONE])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_restart_changes_no_bit_of_a_worker_alone(strategy, optimizer):
    job = small_job(optimizer)
    assert same(run_strategy(strategy, 1, 14, job=job), restarted(strategy, 1, (5, 14), job=job))


def test_batches_go_on_where_they_were_over_the_end_of_an_epoch():
    """240 samples of 4 workers in batches of 8: an epoch of 7.5 steps."""
    assert same(run_strategy("all_reduce", 4, 40), restarted("all_reduce", 4, (7, 8, 15, 23, 40)))


def test_a_restart_further_than_its_budget_does_nothing():
    run = run_strategy("all_reduce", 4, 9)
    assert same(run, run_strategy("all_reduce", 4, 9, resume=run.simulation.save()))


def test_what_was_saved_is_a_copy():
    run = run_strategy("broadcast", 3, 5)
    saved = run.simulation.save()
    before = pickle.dumps(saved)
    run_strategy("broadcast", 3, 10, resume=saved)
    run.simulation.runners[0].node.params[:] = 0
    assert pickle.dumps(saved) == before


@pytest.mark.parametrize("strategy", ["broadcast", "partial", "partial(0.05)"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_statement_1_outlives_restarts(strategy, optimizer):
    run = restarted(strategy, 4, (3, 5, 12), job=small_job(optimizer))
    assert equal_bits(*run.replicas)
    assert not equal_bits(run.replicas[0], GradientSource().start())
    assert set(run.deliveries().values()) == {7}


def test_deferred_debts_are_paid_before_a_run_ends():
    """So that what is saved owes nothing, whatever happens next."""
    run = run_strategy("partial(0.05)", 4, 5)
    assert not any(saved.state.deferred.any() for saved in run.simulation.save().values())


def test_mass_outlives_restarts():
    start = np.random.default_rng(0).normal(size=(4, 8))
    still = bowl_job("sgd(lr=0)")
    first = run_strategy("gossip(0.5)", 4, 5, job=still, replicas=start)
    run = run_strategy("gossip(0.5)", 4, 30, job=still, resume=first.simulation.save())
    masses = [run.nodes[rank].state.mass for rank in range(4)]
    assert sum(masses) == TOTAL_MASS
    assert np.abs(np.array(masses) / TOTAL_MASS @ run.replicas - start.mean(0)).max() < 1e-14


@pytest.mark.parametrize("text", ["gossip(1)", "dpsgd"])
def test_the_dead_stay_dead_after_a_restart(text):
    """Gossip waited at its end for the dead worker, which a restart had made a peer again."""
    setting = {"compute": "constant(1)", "network": "1gbit", "seed": 7, "faults": ["dies(2, at=3.5)"]}
    whole, run = (run_strategy(text, 4, 10, restarts=restarts, **setting) for restarts in ([], [5.5]))
    for rank in (0, 1, 3):
        assert run.nodes[rank].view == whole.nodes[rank].view
        assert 2 not in run.nodes[rank].peers
    assert (run.replicas == whole.replicas).all()


@pytest.mark.parametrize("text", ["asgd", "ps(ssp(2), shards=3)"])
def test_versions_and_clocks_of_servers_go_on(text):
    run = restarted(text, 4, (5, 12))
    for node in run.nodes.values():
        if isinstance(node, Server):
            assert node.optimizer_state.steps == (4 * 12 if text == "asgd" else 12)  # shares of a step add up to 12
            assert node.version == 4 * 12 or text != "asgd"  # gradients of one clock may share a step
            assert node.state.clocks == dict.fromkeys(range(4), 12)
            assert node.state.slowest == 12
            assert not node.state.pushes
            assert not node.state.reads
    assert set(run.deliveries().values()) == {7}


@dataclass(frozen=True)
class Counts(LocalSGD):
    """Negative control: counts the steps to the next average itself, from 0 after a restart."""

    async def worker(self, me):
        count = 0
        while me.training:
            me.optimizer_step(await me.gradient())
            count += 1
            if count % self.period == 0:
                await self.collective.all_reduce(me, me.params)
                me.params /= me.workers


@dataclass(frozen=True)
class FreshLedger(Broadcast):
    """Negative control: after a restart the ledger is made anew from parameters that were rounded."""

    async def worker(self, me):
        me.state = self.worker_state(me)
        await super().worker(me)


def test_a_hidden_count_is_noticed():
    whole = run_strategy(Counts(4), 4, 18)
    assert equal_bits(whole.replicas, run_strategy("local_sgd(4)", 4, 18).replicas)
    assert not equal_bits(whole.replicas, restarted(Counts(4), 4, (9, 18)).replicas)


def test_a_new_ledger_is_noticed():
    run = run_strategy("broadcast", 3, 5)
    exact = [saved.state.exact_sum.total for rank, saved in run.simulation.save().items()]
    assert equal_bits(*exact)
    assert not np.array_equal(exact[0], run.replicas[0])  # what a ledger made anew would begin with
    one, other = (restarted(strategy, 3, (5, 12)) for strategy in ("broadcast", FreshLedger()))
    assert not equal_bits(one.result, other.result)


@pytest.mark.parametrize("lost", ["params", "optimizer", "batches", "state", "random", "step"])
def test_everything_that_is_saved_is_needed(lost):
    """Forgetting any one part shows in the result of one strategy or another."""
    job = small_job("sgd(lr=0.1, momentum=0.9)")
    shown = []
    for strategy, workers in (("all_reduce", 4), ("gossip(0.5)", 4), ("ps(codec=half, feedback=residual)", 1)):
        run = run_strategy(strategy, workers, 9, job=job)
        saved = run.simulation.save()
        fresh = run_strategy(strategy, workers, 0, job=job, evaluate_every=1).simulation.save()
        broken = {a: replace(s, **{lost: getattr(fresh[a], lost)}) for a, s in saved.items()}
        try:
            forgetful = run_strategy(strategy, workers, 18, job=job, resume=broken)
        except FlockstepError:
            shown.append(strategy)
            continue
        rightly = run_strategy(strategy, workers, 18, job=job, resume=saved)
        if forgetful.events != rightly.events or not equal_bits(forgetful.replicas, rightly.replicas):
            shown.append(strategy)
    assert len(shown) >= 1


DATA = (bool, int, float, str, bytes, type(None), np.ndarray, np.generic, slice)


def strangers(value, path):
    """Where a state holds something that is no data: a task, a coroutine, an open handle."""
    if is_dataclass(value):
        for one in fields(value):
            yield from strangers(getattr(value, one.name), f"{path}.{one.name}")
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from strangers(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from strangers(key, path)
            yield from strangers(one, f"{path}[{key}]")
    elif isinstance(value, (list, tuple, set)):
        for one in value:
            yield from strangers(one, f"{path}[]")
    elif not isinstance(value, DATA):
        yield f"{path} is a {type(value).__name__}"


class Inspected(Watched):
    """Looks at the states of all nodes after every step."""

    found = frozenset()

    def note(self, event):
        super().note(event)
        if isinstance(event, StepEvent):
            for runner in self.runners.values():
                self.found |= set(strangers(runner.node.state, "state"))


MIDWAY = [
    "ps(essp(2))",
    "ps(value_bound(0.5))",
    "ps(backup(1))",
    "overlap_local_sgd(3)",
    "streaming_diloco(4, 2, 2)",
    "streaming_diloco(4, 2, 2, codec=half, feedback=residual)",
]


@pytest.mark.parametrize("text", [*registry.names("strategy"), *MIDWAY])
def test_states_are_data_at_every_step(text):
    run = run_strategy(text, 4, 8, job=small_job(OPTIMIZERS[1]), simulation=Inspected)
    assert run.simulation.found == frozenset()


@dataclass(frozen=True)
class KeepsTheTask(OverlapLocalSGD):
    """Negative control: its state holds a task."""

    def _begin(self, me, state):
        super()._begin(me, state)
        state.under_way = me.task("anchor")


def test_a_task_in_a_state_is_noticed():
    found = run_strategy(KeepsTheTask(3), 4, 8, simulation=Inspected).simulation.found
    assert found == {"state.under_way is a Task"}
