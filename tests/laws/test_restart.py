"""Stopped at a step boundary and restarted from what was saved: nothing is forgotten."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from flockstep.errors import FlockstepError
from flockstep.nodes import Server
from flockstep.testing.strategies import equal_bits, run_strategy, small_job

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


@pytest.mark.parametrize("strategy", ALONE)
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


@pytest.mark.parametrize("lost", ["params", "optimizer", "batches", "state", "random", "step"])
def test_everything_that_is_saved_is_needed(lost):
    """Forgetting any one part shows in the result of one strategy or another."""
    job = small_job("sgd(lr=0.1, momentum=0.9)")
    shown = []
    for strategy, workers in (("all_reduce", 4), ("gossip(0.5)", 4), ("ps(codec=half, feedback=residual)", 1)):
        run = run_strategy(strategy, workers, 9, job=job)
        saved = run.simulation.save()
        fresh = run_strategy(strategy, workers, 0, job=job, evaluate_every=1).simulation.save()
        broken = {a: msgspec.structs.replace(s, **{lost: getattr(fresh[a], lost)}) for a, s in saved.items()}
        try:
            forgetful = run_strategy(strategy, workers, 18, job=job, resume=broken)
        except FlockstepError:
            shown.append(strategy)
            continue
        rightly = run_strategy(strategy, workers, 18, job=job, resume=saved)
        if forgetful.events != rightly.events or not equal_bits(forgetful.replicas, rightly.replicas):
            shown.append(strategy)
    assert len(shown) >= 1
