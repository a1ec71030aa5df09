"""What servers' optimizers remember, saved and loaded through the optimizer of a script; one worker in this process."""

from __future__ import annotations

import copy
import re
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import flockstep
from flockstep.errors import ConfigurationError
from flockstep.frameworks.torch_groups import ELEMENTWISE
from flockstep.frameworks.torch_optimizers import settings_of
from flockstep.launchers.comparisons import Comparisons
from flockstep.messages import Message
from flockstep.registry import names
from flockstep.runtime.settings import told
from flockstep.runtime.torch_memory import WorkerMemory, take_settings
from flockstep.strategies.base import Strategy
from flockstep.testing.strategies import equal_bits, run_strategy
from support.collectives import arrays, does
from support.torch_loops import equal, load, net, start, step, values


def plain(kind, steps, model=None, optimizer=None, first=0):
    """Take the same steps with torch's own optimizer alone."""
    model = net() if model is None else model
    optimizer = kind(model.parameters()) if optimizer is None else optimizer
    for number in range(first, first + steps):
        step(model, optimizer, number)
    return model, optimizer


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05)


def adagrad(parameters):
    return torch.optim.Adagrad(parameters, lr=0.05)


KINDS = [momentum, adam, adagrad]


def close(one, other):
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one, other, strict=True))


def remembers_alike(optimizer: Any, own: torch.optim.Optimizer) -> None:
    """Both state dicts hold the same slots, of the same shapes and values."""
    got, right = optimizer.state_dict()["state"], own.state_dict()["state"]
    assert got.keys() == right.keys()
    for index, slots in right.items():
        assert got[index].keys() == slots.keys()
        for name, value in slots.items():
            assert got[index][name].shape == value.shape
            torch.testing.assert_close(got[index][name], value, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["asgd", "ps(bsp, shards=3)", "hierarchical(1)", "downpour"])
def test_servers_hand_out_what_they_remember(strategy, kind):
    """As torch's own state after the same steps, before and after the end."""
    if strategy == "downpour" and kind is adam:
        pytest.skip("one case of that strategy is enough")
    model = net()
    optimizer = flockstep.distribute(model, kind(model.parameters()), strategy)
    _, own = plain(kind, 5)
    for number in range(5):
        step(model, optimizer, number)
    for _ in range(2):
        remembers_alike(optimizer, own)
        optimizer.finish()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_saved_run_goes_on_as_it_would_have(kind, when):
    first, optimizer = plain(kind, 5)
    saved = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
    right, _ = plain(kind, 5, first, optimizer, first=5)
    model = net(3)
    if when == "before":
        inner = kind(model.parameters())
        model.load_state_dict(saved[0])
        inner.load_state_dict(saved[1])
        again = flockstep.distribute(model, inner, "ps(bsp, shards=2)")
    else:
        again = flockstep.distribute(model, kind(model.parameters()), "ps(bsp, shards=2)")
        again.load_state_dict(saved[1])
        with pytest.raises(ConfigurationError, match=r"call optimizer.sync\(\)"):
            step(model, again)
        model.load_state_dict(saved[0])
        again.sync()
    for number in range(5, 10):
        step(model, again, number)
    again.finish()
    assert close(values(model), values(right))


def test_a_loaded_model_alone_leaves_the_servers_momentum():
    """As in PyTorch, where the optimizer is not touched when a model is loaded."""
    model, optimizer = start("ps(bsp, shards=2)", momentum=0.9)
    for number in range(3):
        step(model, optimizer, number)
    before = optimizer.state_dict()["state"][0]["momentum_buffer"].clone()
    load(model, net(1))
    optimizer.sync()
    assert torch.equal(optimizer.state_dict()["state"][0]["momentum_buffer"], before)


def test_states_that_cannot_be_had_are_refused():
    _, optimizer = start("slice_servers", momentum=0.9)
    with pytest.raises(ConfigurationError, match=r"each worker holds a slice of the state of SGD, .* use ps\(bsp\)"):
        optimizer.state_dict()


def grouped(kind):
    """Two groups whose elements lie between each other, stepped on servers by torch's own class."""

    def make(parameters):
        parameters = list(parameters)
        groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.01}]
        more = {"RMSprop": {"momentum": 0.9, "centered": True}, "SGD": {"momentum": 0.9}, "AdamW": {"amsgrad": True}}
        return getattr(torch.optim, kind)(groups, lr=0.02, **more.get(kind, {}))

    return make


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_servers_hand_out_what_torchs_own_classes_remember(kind):
    """Names, shapes and values of plain torch after the same steps, before and after the end."""
    model = net()
    optimizer = flockstep.distribute(model, grouped(kind)(model.parameters()), "ps(bsp, shards=3)")
    _, own = plain(grouped(kind), 5)
    for number in range(5):
        step(model, optimizer, number)
    for _ in range(2):
        remembers_alike(optimizer, own)
        optimizer.finish()


@pytest.mark.parametrize("kind", ELEMENTWISE)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("strategy", ["ps(bsp, shards=2)", "scatter_reduce"])
def test_a_checkpoint_of_torchs_own_classes_is_the_same_run_in_every_bit(kind, when, strategy, tmp_path):
    """Ten steps, or five, a file, another run, and five: loaded before `distribute`, or after it."""
    whole = net()
    optimizer = flockstep.distribute(whole, grouped(kind)(whole.parameters()), strategy)
    for number in range(10):
        if number == 5:
            torch.save((whole.state_dict(), optimizer.state_dict()), tmp_path / "checkpoint")
        step(whole, optimizer, number)
    optimizer.finish()
    parameters, state = torch.load(tmp_path / "checkpoint")
    model = net(3)
    inner = grouped(kind)(model.parameters())
    if when == "before":
        model.load_state_dict(parameters)
        inner.load_state_dict(state)
    again = flockstep.distribute(model, inner, strategy)
    if when == "after":
        model.load_state_dict(parameters)
        again.load_state_dict(state)
        again.sync()
    for number in range(5, 10):
        step(model, again, number)
    again.finish()
    assert equal(values(model), values(whole))


def agreed(strategy, *optimizers):
    """The states of all ranks' optimizers after they have agreed."""
    loop = SimpleNamespace(strategy=Strategy.parse(strategy), workers=len(optimizers), finished=False)
    memories = [WorkerMemory(optimizer, loop) for optimizer in optimizers]
    does(lambda me, _: memories[me.rank].agree(me), arrays(len(optimizers), 1))
    return [optimizer.state_dict() for optimizer in optimizers]


def same(one, other):
    return repr(one) == repr(other)


@pytest.mark.parametrize("kind", [momentum, adam, lambda parameters: grouped("NAdam")(parameters)])
def test_ranks_that_step_along_one_gradient_remember_what_rank_0_does(kind):
    """Also where others remember something else, or nothing; settings of groups come along."""
    first, second, third = (plain(kind, steps, net(steps))[1] for steps in (3, 5, 0))
    first.param_groups[0]["lr"] = 0.03
    right = copy.deepcopy(first.state_dict())
    states = agreed("all_reduce", first, second, third)
    assert all(same(state, right) for state in states)


def test_a_replica_of_its_own_takes_what_rank_0_has_loaded_only_where_it_has_loaded_nothing():
    first, second, third = (plain(momentum, steps, net(steps))[1] for steps in (3, 5, 0))
    right = [copy.deepcopy(one.state_dict()) for one in (first, second)]
    states = agreed("gossip(0.5)", first, second, third)
    assert same(states[0], right[0])
    assert same(states[1], right[1])
    assert same(states[2], right[0])


@pytest.mark.parametrize(
    ("strategy", "first", "second", "said"),
    [
        (
            "all_reduce",
            {},
            {"lr": 0.2},
            "^lr of SGD .* workers of all_reduce step along .* 0.1 on worker 0 and 0.2 on worker 1",
        ),
        (
            "ps(bsp)",
            {},
            {"lr": 0.2},
            r"^lr of SGD .* servers of ps\(consistency=bsp\) update the parameters for all workers",
        ),
        ("scatter_reduce", {}, {"lr": 0.2}, "^lr of SGD .* each worker of scatter_reduce updates a part"),
        (
            "asgd",
            {},
            {"momentum": 0.5},
            "^momentum of SGD must be the same .* got 0.9 on worker 0 and 0.5 on worker 1; give",
        ),
        ("asgd", {}, {"lr": 0.2}, ""),
        (
            "ps(softsync(1))",
            {},
            {"lr": 0.2},
            r"^lr of SGD .* servers of ps\(consistency=softsync\(n=1\)\) update the parameters for all workers",
        ),
        ("local_sgd", {}, {"lr": 0.2, "momentum": 0.5}, ""),
        ("all_reduce", {}, {"foreach": True, "initial_lr": 3.0}, ""),
    ],
)
def test_settings_that_one_rank_would_use_for_all_are_compared(strategy, first, second, said):
    optimizers = [momentum(net().parameters()) for _ in range(2)]
    for optimizer, changes in zip(optimizers, (first, second), strict=True):
        optimizer.param_groups[0].update(changes)
    assert re.search(said or "^$", refusal(strategy, *optimizers))


def test_a_rank_that_has_loaded_nothing_takes_the_settings_that_rank_0_has_loaded():
    def refused(*steps):
        found = [plain(momentum, count, net(count))[1] for count in steps]
        found[0].param_groups[0]["lr"] = 0.03
        return refusal("all_reduce", *found)

    assert refused(3, 0, 0) == ""
    assert "got 0.03 on worker 0 and 0.1 on worker 1" in refused(3, 5, 0)
    assert "got 0.03 on worker 0 and 0.1 on worker 1" in refused(0, 5, 5)


def test_other_optimizers_and_other_groups_are_named():
    def refused(other):
        return refusal("all_reduce", momentum(net().parameters()), other)

    model = net()
    halves = torch.optim.SGD([{"params": list(part.parameters())} for part in (model[0], model[2])], lr=0.1)
    assert "the class of the optimizer must be the same on all workers" in refused(adam(net().parameters()))
    assert "got SGD on worker 0 and Adam on worker 1" in refused(adam(net().parameters()))
    assert "the number of parameter groups of SGD" in refused(halves)


def refusal(strategy, *optimizers, step=0):
    """Why the workers may not step with these optimizers, at the start or at a step; empty if they may."""
    comparison = Comparisons(len(optimizers), lambda: Strategy.parse(strategy))
    try:
        for rank, optimizer in reversed(list(enumerate(optimizers))):
            report(comparison, rank, optimizer, step)
    except ConfigurationError as error:
        return str(error)
    return ""


def report(comparison, rank, optimizer, step=0, ends=1):
    note = {"step": step, "ends": ends, "start": int(step == 0), "loaded": int(bool(optimizer.state) and step == 0)}
    settings = told(type(optimizer).__name__, settings_of(optimizer))
    comparison.hear(Message(rank, "settings", settings, note))


def test_settings_are_compared_for_equal_steps_alone_and_named_with_their_values():
    """A schedule changes them at every step, and workers of asynchronous strategies are at different steps."""
    first, second = (momentum(net().parameters()) for _ in range(2))
    second.param_groups[0]["lr"] = 0.2
    comparison = Comparisons(2, lambda: Strategy.parse("ps(ssp(3))"))
    report(comparison, 0, first, 10)
    report(comparison, 1, second, 20)
    with pytest.raises(ConfigurationError, match=r"got 0.1 on worker 0 and 0.2 on worker 1 at step 10; let schedules"):
        report(comparison, 1, second, 10)


def test_settings_that_may_differ_are_told_of_once_if_they_part(capsys):
    first, second = (momentum(net().parameters()) for _ in range(2))
    comparison = Comparisons(2, lambda: Strategy.parse("local_sgd"))
    for at in (0, 10, 20):
        second.param_groups[0]["lr"] = 0.1 if at == 0 else 0.2
        report(comparison, 0, first, at)
        report(comparison, 1, second, at)
    said = capsys.readouterr().err
    assert said.count("flockstep: ") == 1
    assert "lr of SGD has changed to 0.1 on worker 0 and 0.2 on worker 1 at step 10; if this is not meant" in said
    assert refusal("local_sgd", first, second) == ""
    assert capsys.readouterr().err == "", "meant from the start"


def test_settings_that_part_after_the_last_comparison_or_the_last_change_of_workers_are_told_of(capsys):
    first, second = (momentum(net().parameters()) for _ in range(2))
    second.param_groups[0]["momentum"] = 0.8
    comparison = Comparisons(2, lambda: Strategy.parse("ps(ssp(3))"))
    for rank, optimizer in enumerate((first, second)):
        report(comparison, rank, optimizer, 206, ends=0)
    assert "momentum of SGD has changed to 0.9 on worker 0 and 0.8 on worker 1 at step 206" in capsys.readouterr().err


SAME = [0.5, np.float32(0.5), np.float64(0.5), torch.tensor(0.5), torch.tensor([0.5]), Fraction(1, 2)]


def test_settings_that_equal_each_other_do_not_differ():
    def optimizer(lr, nesterov):
        return torch.optim.SGD(net().parameters(), lr=lr, momentum=0.9, nesterov=nesterov)

    for lr in SAME:
        assert refusal("all_reduce", optimizer(0.5, True), optimizer(lr, np.bool_(True))) == ""
    assert "got 0.5 on worker 0 and 0.25 on" in refusal(
        "all_reduce", optimizer(0.5, True), optimizer(Fraction(1, 4), 1)
    )


@pytest.mark.parametrize("loaded", [False, True])
def test_where_servers_step_all_ranks_take_the_settings_that_rank_0_has_loaded(loaded):
    optimizers = [momentum(net().parameters()) for _ in range(3)]
    optimizers[0].param_groups[0] |= {"lr": 0.03, "mine": len}
    does(lambda me, _: take_settings(me, optimizers[me.rank], loaded and me.rank == 0), arrays(3, 1))
    assert [one.param_groups[0]["lr"] for one in optimizers] == [0.03, *[0.03 if loaded else 0.1] * 2]
    assert "mine" not in optimizers[1].param_groups[0]


class Own(torch.optim.SGD):
    """A class that may read any entry of its groups."""


def test_entries_that_torch_ignores_stay_on_their_rank():
    """What a class of the script's own reads has to travel, or is refused."""

    def own(kind, setting, lr=0.1):
        optimizer = kind(net().parameters(), lr=lr)
        optimizer.param_groups[0]["mine"] = setting
        return optimizer

    first, second = own(torch.optim.SGD, {1}), own(torch.optim.SGD, len, lr=0.2)
    assert refusal("all_reduce", first, own(torch.optim.SGD, len)) == ""
    agreed("all_reduce", first, second)
    assert (second.param_groups[0]["mine"], second.param_groups[0]["lr"]) == (len, 0.1)
    with pytest.raises(
        ConfigurationError, match=r"the state of Own cannot be sent .* load such a state on every rank before"
    ):
        agreed("all_reduce", own(Own, len), own(Own, 1))


def test_a_loaded_state_is_not_stepped_with_before_all_ranks_agree(monkeypatch):
    """Whoever loads it, through the optimizer that the script made or the one that it was given."""
    for load_through in ("inner", None):
        model, optimizer = start(momentum=0.9)
        step(model, optimizer)
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        step(model, optimizer)  # alone
        monkeypatch.setattr(optimizer.loop, "workers", 2)
        (optimizer.inner if load_through else optimizer).load_state_dict(state)
        with pytest.raises(ConfigurationError, match=r"other ranks do not have; call optimizer.sync\(\) on every rank"):
            optimizer.step()


ALIKE = [s for s in map(Strategy.parse, names("strategy")) if s.traits.alike and not s.traits.needs_job]


@pytest.mark.parametrize("strategy", ALIKE, ids=str)
def test_replicas_that_step_alike_stay_equal_and_take_what_rank_0_has_loaded(strategy):
    """Whatever may be clipped: those that step by signs parted in silence."""
    run = run_strategy(strategy, 3, 4)
    assert all(equal_bits(run.params[0], run.params[rank]) for rank in (1, 2))
    first, second, third = (plain(momentum, steps, net(steps))[1] for steps in (3, 5, 0))
    right = copy.deepcopy(first.state_dict())
    assert all(same(state, right) for state in agreed(str(strategy), first, second, third))


def test_all_that_combine_gradients_for_workers_are_alike():
    assert {"all_reduce", "decoupled_momentum", "majority_vote"} <= {str(strategy).split("(")[0] for strategy in ALIKE}


@pytest.mark.parametrize("own", [0.0, 0.9])
@pytest.mark.parametrize("rule", ["negative_momentum(-0.5)", "momentum_corrected(0.9)"])
def test_a_rules_velocity_is_saved_loaded_and_kept(rule, own):
    """The same steps in every bit with a sync() in between, and from a checkpoint; the state was empty."""
    strategy, ends = f"ps(bsp, shards=2, server_update={rule})", []
    for at in (None, "sync", "load"):
        model, optimizer = start(strategy, momentum=own)
        for number in range(6):
            if number == 3 and at == "load":
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                assert saved[1]["state"][0]["momentum_buffer"].abs().sum() > 0
                model, optimizer = start(strategy, net(3), momentum=own)
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            if number == 3 and at is not None:
                optimizer.sync()
            step(model, optimizer, number)
        ends.append(values(model))
    assert equal(ends[0], ends[1])
    assert equal(ends[0], ends[2])


@pytest.mark.parametrize(
    "strategy", ["ps(bsp, shards=2, server_update={})", "downpour(1, 1, overlap=false, server_update={})"]
)
def test_a_rules_own_optimizer_is_kept_over_sync_and_neither_saved_nor_loaded(strategy):
    ends = []
    for at in (None, 3):
        model, optimizer = start(strategy.format("with_optimizer(adagrad(0.1))"), momentum=0.9)
        for number in range(6):
            if number == at:
                optimizer.sync()
            step(model, optimizer, number)
        optimizer.finish()
        ends.append(values(model))
    assert equal(*ends)
    model, optimizer = start(strategy.format("with_optimizer(adagrad(0.1))"), momentum=0.9)
    with pytest.raises(
        ConfigurationError, match=r"a separate optimizer, .* cannot be saved or loaded; use a server_update"
    ):
        optimizer.state_dict()
    with pytest.raises(
        ConfigurationError, match=r"a separate optimizer, .* cannot be saved or loaded; use a server_update"
    ):
        optimizer.load_state_dict(plain(momentum, 2)[1].state_dict())


def test_only_a_script_that_saves_states_holds_the_last_one():
    """It is twice the parameters for Adam; whoever asks too late is told."""
    model = net()
    optimizer = flockstep.distribute(model, adam(model.parameters()), "asgd")
    step(model, optimizer)
    optimizer.finish()
    assert not optimizer.inner.state
    with pytest.raises(ConfigurationError, match=r"after finish\(\) .* call state_dict\(\) before finish"):
        optimizer.state_dict()
