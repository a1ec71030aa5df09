"""Changes of a distributed module's values and of its optimizer's groups are noticed, up to the end of the run."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import flockstep
from flockstep.codecs.dgc import Dgc
from flockstep.errors import ConfigurationError, Diverged
from flockstep.feedback.nothing import NoFeedback
from flockstep.frameworks import torch_flat
from flockstep.frameworks.torch_flat import FlatModule
from flockstep.nodes import Cluster, Node
from flockstep.runtime.torch_guard import Guard
from flockstep.strategies.encoding import codec_for
from flockstep.strategies.local_sgd import LocalSGD
from flockstep.strategies.synchronization_schedules.post_local import PostLocal
from flockstep.strategies.synchronization_schedules.scheduled import Scheduled
from support.torch_loops import equal, load, net, start, step, values


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_one_value_that_is_not_finite_is_found(dtype, value):
    model = nn.Linear(5, 3).to(dtype)
    guard = Guard(FlatModule(model))
    assert guard.not_finite() is None
    model.bias.data[1] = value
    guard.note()
    assert guard.not_finite() == "bias"


class Counted(torch.Tensor):
    """A tensor of which it is counted how often the host asks for values, and then waits for the device."""

    asked: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ in ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "nonzero", "equal"):
            cls.asked.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("size", [300, 900])  # the larger model is compared in part
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_host_waits_for_a_device_once_before_a_step_and_once_after_it(dtype, size, monkeypatch):
    monkeypatch.setattr(torch_flat, "native", lambda flat: flat.as_subclass(Counted))
    model = nn.Sequential(nn.Linear(size, size, dtype=dtype), nn.Linear(size, size))
    guard = Guard(FlatModule(model))
    Counted.asked.clear()
    guard.check()
    guard.note()
    assert guard.not_finite() is None
    assert Counted.asked == ["__bool__", "__bool__"]  # whether something changed, whether all is finite
    model[1].weight.data += 1
    with pytest.raises(ConfigurationError, match="weight was changed"):
        guard.check()


@pytest.mark.parametrize("strategy", ["all_reduce", "easgd(2)", "asgd", "bucketed"])
def test_a_model_loaded_after_the_last_step_is_not_silently_undone(strategy):
    """finish() and consensus() would replace or leave out what the script has loaded."""
    model, optimizer = start(strategy)
    for number in range(3):
        step(model, optimizer, number)
    load(model, net(1))
    with pytest.raises(ConfigurationError, match=r"0.weight was changed .* call optimizer.sync\(\)"):
        optimizer.finish()
    with pytest.raises(ConfigurationError, match=r"0.weight was changed"), optimizer.consensus():
        pass
    optimizer.sync()
    optimizer.finish()
    assert equal(values(model), values(net(1)))
    load(model, net(2))
    optimizer.finish()
    assert equal(values(model), values(net(2)))  # it is the script's own now


@pytest.mark.parametrize("strategy", ["all_reduce", "asgd"])
def test_an_optimizer_holds_what_the_module_trains_and_no_more(strategy):
    """What nobody exchanges would never be stepped on servers, and part the replicas elsewhere."""
    model, head = net(), nn.Linear(2, 2)
    sgd = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    with pytest.raises(ConfigurationError, match=r"parameter of shape \(2, 2\) that does not belong to the module"):
        flockstep.distribute(model, sgd, strategy)
    model, optimizer = start(strategy)
    step(model, optimizer)
    optimizer.add_param_group({"params": [*nn.Linear(2, 2).requires_grad_(False).parameters()]})  # torch skips these
    optimizer.add_param_group({"params": [*head.parameters()]})
    for call in (optimizer.step, optimizer.sync, optimizer.finish):
        with pytest.raises(ConfigurationError, match=r"parameter of shape \(2, 2\) .* to distribute"):
            call()
    optimizer.param_groups.pop()
    optimizer.param_groups.pop()
    step(model, optimizer)
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(
        ConfigurationError,
        match=r"the optimizer must hold every trainable parameter, but 2.bias is missing; .*once for each optimizer",
    ):
        optimizer.step()


@pytest.mark.parametrize("strategy", ["all_reduce", "local_sgd(2)"])
def test_steps_go_on_after_a_change(strategy):
    """Also those that sentences name and schedules of strategies go by, where programs begin anew."""
    model, optimizer = start(strategy)
    for number in range(3):
        step(model, optimizer, number)
    load(model, net(1))
    optimizer.sync()
    optimizer.sync()
    step(model, optimizer)
    model[0].weight.grad.fill_(math.nan)
    with pytest.raises(Diverged, match=r"worker 0 must be finite, got nan in '0.weight' at step 4"):
        optimizer.step()


@pytest.mark.parametrize(
    "period", [Scheduled((1, 4), (0, 3)), PostLocal(start_at=3, period=4), PostLocal(period=4)], ids=str
)
def test_a_schedule_of_periods_goes_on_after_a_change(period, monkeypatch):
    """Replicas meet after each of three steps, and from then on, at a smaller learning rate, after every fourth."""
    model, optimizer = start(LocalSGD(period))
    rounds = []
    monkeypatch.setattr(optimizer.loop._runner, "updates", lambda source, count, *_: rounds.append(count))
    for number in range(8):
        if number == 3:
            optimizer.param_groups[0]["lr"] = 0.05
        if number == 4:
            load(model, net(1))
            optimizer.sync()
        step(model, optimizer, number)
    assert rounds == [1, 1, 1, 4]


def test_the_schedule_of_a_codec_goes_on_after_a_change():
    """Both ends of a message count the steps of the run, and its number is that since the change."""
    me = Node(0, Cluster(1), np.zeros(1000, np.float32), np.random.default_rng(0))
    codec = Dgc(ratio=0.01, warmup=8)
    me.before, me.step = 6, 3
    assert codec_for(me, codec, NoFeedback()) == codec_for(me, codec, NoFeedback(), step=3) == codec.bind_step(8)
    assert codec.bind_step(8) != codec.bind_step(2)


def test_what_is_drawn_by_the_step_of_the_run_goes_on_after_a_change():
    """Were steps counted anew, the same few elements would be drawn after every change, and the others never train."""
    model = nn.Linear(1000, 1, bias=False)
    before = model.weight.detach().clone()
    model, optimizer = start("ps(codec=random_k(0.01), feedback=none)", model)
    for _ in range(6):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 1000)).sum().backward()
            optimizer.step()
        optimizer.sync()
    assert int((model.weight != before).sum()) > 100  # 120 are drawn in 12 steps
