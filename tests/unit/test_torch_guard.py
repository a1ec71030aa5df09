"""What a script may do to a distributed module between two steps, tried with one worker in this process."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import flockstep
from flockstep.errors import CompositionError, ConfigurationError
from flockstep.frameworks.torch_flat import FlatModule
from flockstep.runtime.loop import Loop
from flockstep.runtime.torch_guard import Guard
from flockstep.strategies.base import Strategy
from support.torch_loops import equal, load, net, start, step, values

STRATEGIES = [
    "all_reduce", "bucketed", "bsp", "asgd", "ps(essp(2), shards=3)", "downpour", "hierarchical(1)", "easgd(2)",
    "easgd_sync(2)", "tree_easgd(up=2)", "local_sgd(2)", "overlap_local_sgd(2)", "streaming_diloco", "sparta", "dpsgd",
    "adpsgd", "sgp", "gossip(1)", "broadcast", "partial", "scatter_reduce", "slice_servers", "tree_server", "hogwild",
    "powersgd", "decoupled_momentum", "majority_vote", "two_way", "mpca",
]  # fmt: skip


def through_data(model, other):
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        p.data.copy_(q.data)


def elsewhere(model, other):
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        p.data = q.data.clone()


@pytest.mark.parametrize("change", [load, through_data, elsewhere])
@pytest.mark.parametrize("strategy", ["all_reduce", "asgd", "easgd(2)"])
def test_a_loaded_model_is_refused_until_it_is_taken_up(strategy, change):
    model, optimizer = start(strategy)
    for number in range(3):
        step(model, optimizer, number)
    change(model, net(1))
    with pytest.raises(ConfigurationError, match=r"parameter 0.weight was changed .* call optimizer.sync\(\)"):
        step(model, optimizer)
    change(model, net(1))
    optimizer.sync()
    assert equal(values(model), values(net(1)))
    step(model, optimizer)
    optimizer.finish()


def two_with_a_shared_layer():
    layer = nn.Linear(4, 3)
    return nn.Sequential(layer, nn.Linear(3, 2)), nn.Sequential(layer, nn.Linear(3, 2))


def test_a_parameter_of_two_models_is_refused_at_a_step():
    first, second = [start("all_reduce", model) for model in two_with_a_shared_layer()]
    step(*second)
    with pytest.raises(ConfigurationError, match=r"parameter 0.weight was changed .* one torch.nn.ModuleList of all"):
        step(*first)


def test_one_call_for_two_models_that_share_a_layer_is_plain_torch():
    both, others = nn.ModuleList(two_with_a_shared_layer()), nn.ModuleList(two_with_a_shared_layer())
    load(others, both)
    _, ours = start("all_reduce", both)
    plain = torch.optim.SGD(others.parameters(), lr=0.1)
    for number in range(4):
        step(both[number % 2], ours, number)
        step(others[number % 2], plain, number)
    ours.finish()
    assert equal(values(both), values(others))


def test_a_second_call_for_a_module_before_the_first_has_ended_is_named_as_the_cause():
    model, early = start()
    step(model, early)
    _, late = start(model=model)
    for number in (1, 2, 3):  # the early optimizer does not claim these steps
        step(model, late, number)
    with pytest.raises(ConfigurationError, match=r"0.weight was changed .* call finish\(\) before that call"):
        step(model, early)
    late.finish()
    other, phase = start()
    for _ in range(2):
        step(other, phase)
        phase.finish()
        _, phase = start(model=other)


def clamp(model):
    for p in model.parameters():
        p.data.clamp_(-0.2, 0.2)


@pytest.mark.parametrize(
    ("strategy", "advice"),
    [
        ("all_reduce", r"clamp them, register the change with optimizer\.register_step_post_hook"),
        ("local_sgd(2)", r"clamp them, register the change with optimizer\.register_step_post_hook"),
        ("bsp", r"clamp them, take a strategy whose workers step, such as all_reduce .*register_step_post_hook"),
        ("asgd", r"clamp them, take a strategy whose workers step, such as all_reduce .*register_step_post_hook"),
        ("scatter_reduce", r"clamp them, take a strategy whose workers step, such as all_reduce .*_post_hook"),
    ],
)
def test_clamped_weights_are_told_of_the_hook(strategy, advice):
    model, optimizer = start(strategy)
    step(model, optimizer)
    clamp(model)
    with pytest.raises(ConfigurationError, match=advice):
        step(model, optimizer)


@pytest.mark.parametrize("strategy", ["bsp", "asgd", "scatter_reduce"])
def test_a_hook_that_clamps_where_servers_step_is_refused(strategy):
    model, optimizer = start(strategy)
    optimizer.register_step_post_hook(lambda *_: clamp(model))
    step(model, optimizer)
    with pytest.raises(ConfigurationError, match="take a strategy whose workers step, such as all_reduce or local_sgd"):
        step(model, optimizer)


@pytest.mark.parametrize("strategy", ["all_reduce", "bucketed", "local_sgd(2)", "gossip(1)", "easgd(2)"])
def test_a_hook_clamps_as_in_plain_torch(strategy):
    """`easgd` moves the replica to a center, whose initial weights must be within the limits, too."""
    model, other = net(), net()
    clamp(model)
    clamp(other)
    _, optimizer = start(strategy, model, lr=0.5)
    plain = torch.optim.SGD(other.parameters(), lr=0.5)
    optimizer.register_step_post_hook(lambda *_: clamp(model))
    for number in range(4):
        step(model, optimizer, number)
        step(other, plain, number)
        clamp(other)
    optimizer.finish()
    assert strategy == "easgd(2)" or equal(values(model), values(other))
    assert max(float(value.abs().max()) for value in values(model)) == pytest.approx(0.2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_after_a_change_every_strategy_begins_anew(strategy):
    """Negative control and oracle in one: a run that begins with the loaded model, and one that never loads it."""
    try:
        model, optimizer = start(strategy)
    except CompositionError:
        pytest.skip("needs a declared job")
    for number in range(5):
        step(model, optimizer, number)
    without = values(model)
    load(model, net(1))
    optimizer.sync()
    other, fresh = start(strategy, net(1))
    for number in range(5, 10):
        step(model, optimizer, number)
        step(other, fresh, number)
    optimizer.finish()
    fresh.finish()
    assert equal(values(model), values(other))
    assert not equal(values(model), without)


def test_what_ends_as_it_was_is_no_change():
    """Averaged weights are put in for an evaluation and taken out again."""
    model, optimizer = start()
    step(model, optimizer)
    kept = copy.deepcopy(model.state_dict())
    load(model, net(1))
    load(model, net(0))
    model.load_state_dict(kept)
    step(model, optimizer)
    other, untouched = start()
    for _ in range(2):
        step(other, untouched)
    assert equal(values(model), values(other))


class Large(nn.Module):
    """Parameters of which every 320th element is compared, and a scale."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(20 << 16))
        self.second = nn.Parameter(torch.zeros(7, 3 << 10, dtype=dtype))
        self.scale = nn.Parameter(torch.ones(2, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["first", "second", "scale"])
def test_a_change_through_data_of_a_parameter_of_a_large_model_is_found(dtype, name):
    model = Large(dtype)
    guard = Guard(FlatModule(model))
    for _ in range(2):
        guard.check()
        getattr(model, name).data.sub_(1)
        with pytest.raises(ConfigurationError, match=f"parameter {name} was changed"):
            guard.check()
        guard.note()


def swapped(model, average, clones):
    """Evaluate `average` in the place of the model, by its memory, and put the old values back."""
    kept = [p.data.clone() if clones else p.data for p in model.parameters()]
    for p, other in zip(model.parameters(), average.parameters(), strict=True):
        p.data = other.data
    for p, old in zip(model.parameters(), kept, strict=True):
        p.data = old


@pytest.mark.parametrize("strategy", ["all_reduce", "bsp", "local_sgd(2)", "gossip(1)"])
@pytest.mark.parametrize("clones", [False, True])
def test_equal_values_at_another_address_are_no_change(strategy, clones):
    (model, optimizer), (other, untouched) = start(strategy), start(strategy)
    for number in range(3):
        step(model, optimizer, number)
        step(other, untouched, number)
        swapped(model, net(1), clones)
    optimizer.finish()
    untouched.finish()
    assert equal(values(model), values(other))


def plain_step(model, optimizer):
    """A step with an optimizer that is not the distributed one."""
    model.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("strategy", ["all_reduce", "bsp", "local_sgd(2)", "gossip(1)"])
def test_another_optimizer_that_steps_is_named_at_the_next_backward_pass(strategy):
    model, optimizer = start(strategy)
    step(model, optimizer)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    plain_step(model, other)
    with pytest.raises(
        ConfigurationError, match=r"0.weight was changed after backward\(\) without step\(\) .*is not the one"
    ):
        plain_step(model, other)
    with pytest.raises(ConfigurationError, match="that was distributed is not the one that steps"):
        optimizer.finish()


class Assigns(torch.optim.SGD):
    """An optimizer that writes through `.data`, which torch does not count."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.data.sub_(0.1 * p.grad)


def test_another_optimizer_that_steps_through_data_is_named_at_the_end():
    model, optimizer = start()
    step(model, optimizer)
    plain_step(model, Assigns(model.parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match="that was distributed is not the one that steps"):
        optimizer.loop.require_used()


def test_a_model_that_is_loaded_after_the_last_step_is_not_taken_for_another_optimizer():
    model, optimizer = start()
    step(model, optimizer)
    load(model, net(1))
    optimizer.loop.require_used()


class Averages(torch.optim.SGD):
    """An optimizer with methods of its own: one puts other values into the module, one steps."""

    def swap(self, by=0.5):
        for p in self.param_groups[0]["params"]:
            p.data.mul_(by)

    def climb(self):
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad)


def averages(strategy="all_reduce"):
    model = net()
    return model, flockstep.distribute(model, Averages(model.parameters(), lr=0.1), strategy)


@pytest.mark.parametrize("strategy", ["all_reduce", "local_sgd(2)", "gossip(1)"])
def test_what_the_optimizer_s_own_methods_change_between_steps_is_its_business(strategy):
    model, optimizer = averages(strategy)
    other = net()
    plain = Averages(other.parameters(), lr=0.1)
    for number in range(3):
        for one, its in ((model, optimizer), (other, plain)):
            step(one, its, number)
            its.swap(by=0.5)
    optimizer.finish()
    assert equal(values(model), values(other))


def test_an_own_step_of_the_optimizer_is_refused_with_the_way_out():
    model, optimizer = averages()
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ConfigurationError, match=r"Averages.climb\(\) stepped with .* step\(self, closure\), without"):
        optimizer.climb()


def test_values_that_an_optimizer_puts_in_where_servers_step_are_refused():
    model, optimizer = start("bsp")
    optimizer.inner.swap = Averages.swap.__get__(optimizer.inner)
    step(model, optimizer)
    with pytest.raises(ConfigurationError, match=r"SGD.swap\(\) changed the parameters, which servers .* take a strat"):
        optimizer.swap()


def test_a_change_of_the_script_is_not_hidden_by_a_method_of_the_optimizer():
    model, optimizer = averages()
    step(model, optimizer)
    load(model, net(1))
    optimizer.swap()
    with pytest.raises(ConfigurationError, match=r"0\.weight was changed between two steps outside"):
        step(model, optimizer)


def unfreeze(model):
    model[0].weight.requires_grad_(True)


def freeze(model):
    model[2].bias.requires_grad_(False)


def replace(model):
    model[2] = nn.Linear(3, 2)


def swap(model):
    model[2].weight = nn.Parameter(torch.zeros_like(model[2].weight))


def grow(model):
    model.append(nn.Linear(2, 2))


def shrink(model):
    del model[2]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (unfreeze, r"parameter 0.weight was added or unfrozen after flockstep.distribute, .*lr=0"),
        (freeze, r"parameter 2.bias was removed or frozen after flockstep.distribute, .*lr=0"),
        (replace, r"parameter 2.weight was added or unfrozen after .* copy new weights to the old parameters"),
        (swap, r"parameter 2.weight was added or unfrozen after .* copy new weights to the old parameters"),
        (grow, r"parameter 3.weight was added or unfrozen after flockstep.distribute"),
        (shrink, r"parameter 2.weight was removed or frozen after flockstep.distribute"),
    ],
)
def test_another_structure_is_refused(change, sentence):
    model = net()
    model[0].weight.requires_grad_(False)
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    optimizer = flockstep.distribute(model, sgd, "all_reduce")
    step(model, optimizer)
    change(model)

    def train():
        for _ in range(1 if change is swap else 10):  # another module is found in time
            optimizer.step()

    with pytest.raises(ConfigurationError, match=sentence):
        train()
    with pytest.raises(ConfigurationError, match=sentence):
        optimizer.sync()


def test_values_that_are_not_finite_are_told_once():
    """A finite gradient, and a learning rate that is far too large."""
    model, optimizer = start(lr=1e38)

    def far():
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e3)
        optimizer.step()

    with pytest.warns(
        RuntimeWarning, match=r"parameters of worker 0 are not finite after step 1, the first is 0.weight; lower"
    ):
        far()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        far()


def test_large_values_are_finite():
    """The squares of these values are infinite."""
    model, optimizer = start(lr=0.0)
    with torch.no_grad():
        model[0].weight.fill_(1e30)
    optimizer.sync()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, optimizer)
    assert math.isfinite(float(model[0].weight.detach().max()))


@pytest.mark.parametrize("strategy", ["asgd", "ps(bsp, shards=3)", "easgd(2)", "local_sgd(3)", "gossip(1)", "hogwild"])
def test_the_common_model_is_what_the_end_returns(strategy):
    model, optimizer = start(strategy)
    for number in range(5):
        step(model, optimizer, number)
    own = values(model)
    with optimizer.consensus():
        common = values(model)
    assert equal(values(model), own)
    if strategy == "easgd(2)":
        assert not equal(common, own)
    optimizer.finish()
    if strategy != "hogwild":  # its replicas read the common array before the next gradient
        assert equal(values(model), common)


def test_an_ensemble_has_no_common_model():
    _, optimizer = start("ensemble")
    with pytest.raises(CompositionError, match="the model of each rank"), optimizer.consensus():
        pass


def test_sync_between_backward_and_step_of_bucketed_is_refused():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
    _, optimizer = start("bucketed(first=0.001)", model)
    model(torch.ones(2, 64)).sum().backward()
    with pytest.raises(ConfigurationError, match="call it after step"):
        optimizer.sync()


@pytest.mark.parametrize(
    ("rule", "holds_up"),
    [
        ("k_async(1)", False), ("k_async(2)", True), ("k_async(4)", False), ("k_batch_async(3)", False),
        ("k_sync(1)", False), ("k_sync(3)", True), ("k_sync(4)", False), ("k_batch_sync(3)", False),
        ("backup(0)", False), ("backup(1)", True), ("backup(3)", False), ("bsp", False), ("ssp(1)", False),
    ],
)  # fmt: skip
def test_an_exchange_of_all_ranks_is_refused_only_where_a_step_waits_for_some(rule, holds_up):
    """With four workers: where a step takes one gradient, or all of them, nobody is left waiting."""
    loop = SimpleNamespace(strategy=Strategy.parse(f"ps({rule})"), workers=4, _worker=SimpleNamespace(step=7), _taken=3)
    with pytest.raises(CompositionError, match="would delay the step") if holds_up else contextlib.nullcontext():
        Loop._require_rest(loop, "sync")
