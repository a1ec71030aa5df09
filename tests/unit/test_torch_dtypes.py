"""Parameters of several dtypes: the flat array is the master copy, and narrower parameters hold it rounded."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flockstep
from flockstep.errors import ConfigurationError
from flockstep.frameworks import torch_flat
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.torch import TorchEngine
from flockstep.frameworks.torch_flat import FlatModule
from flockstep.testing.strategies import run_strategy
from support.elsewhere import Elsewhere
from support.mixed import Mixed, backward
from support.torch_loops import equal, start, step, values

STRATEGIES = [
    "all_reduce", "bucketed(first=0.0001)", "bsp", "asgd", "ps(essp(2), shards=3)", "downpour", "easgd(2)",
    "local_sgd(2, outer_optimizer=nesterov)", "overlap_local_sgd(2)", "streaming_diloco", "dpsgd", "sgp", "gossip(1)",
    "broadcast", "partial", "scatter_reduce", "hogwild", "powersgd", "decoupled_momentum",
    "ps(bsp, codec=half, feedback=residual)",
]  # fmt: skip
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, eps=1e-4),
    "foreach": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, eps=1e-4, foreach=True),
}


KINDS = {
    "bfloat16-float32": Mixed,
    "float16-float32": lambda: Mixed(torch.float16),
    "float32-float64": lambda: Mixed(torch.float32, torch.float64),
    "float16-bfloat16": lambda: Mixed(torch.float16, torch.bfloat16),
    "bfloat16": lambda: Mixed(wide=torch.bfloat16),
}


def rounded(flat: FlatModule) -> list[torch.Tensor]:
    """The values that the parameters have to hold."""
    views = flat.views(torch.as_tensor(flat.params))
    return [view.to(p.dtype) for view, p in zip(views, flat.parameters, strict=True)]


@pytest.mark.parametrize(
    ("kind", "master"),
    [("bfloat16-float32", "float32"), ("float32-float64", "float64"), ("float16-bfloat16", "float32"),
     ("bfloat16", "float32")],
)  # fmt: skip
def test_the_flat_array_is_as_wide_as_the_widest(kind, master):
    model = KINDS[kind]()
    before = values(model)
    flat = FlatModule(model)
    assert (flat.schema.dtype, str(flat.params.dtype), str(flat.grads.dtype)) == (master, master, master)
    assert [p.dtype for p in model.parameters()] == [p.dtype for p in before]
    assert equal(values(model), before)
    assert np.array_equal(flat.params, torch.cat([p.flatten().to(getattr(torch, master)) for p in before]).numpy())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", ["all_reduce", "bucketed(first=0.0001)", "local_sgd(2)"])
def test_one_worker_trains_as_a_plain_loop(strategy, optimizer, kind):
    """Bit for bit: the optimizer steps on the parameters as they are, with gradients in their dtype."""
    model, plain = KINDS[kind](), KINDS[kind]()
    own = OPTIMIZERS[optimizer](plain.parameters())
    distributed = flockstep.distribute(model, OPTIMIZERS[optimizer](model.parameters()), strategy)
    for number in range(6):
        for each, stepper in ((model, distributed), (plain, own)):
            stepper.zero_grad(set_to_none=number % 2 == 0)
            backward(each, number)
            if not strategy.startswith("bucketed"):
                flockstep.clip_grad_norm_(each.parameters(), 0.3)
            stepper.step()
        assert equal(values(model), values(plain))
    distributed.finish()
    assert equal(values(model), values(plain))


def test_servers_step_on_the_master_copy():
    """Steps too small for a bfloat16 add up there. Negative control: the plain loop, most of which stays as it is."""
    model, plain = Mixed(), Mixed()
    master = [p.detach().to(torch.float32) for p in model.parameters()]
    _, optimizer = start("ps(bsp)", model, lr=1e-5)
    sgd = torch.optim.SGD(plain.parameters(), lr=1e-5)
    for number in range(20):
        for each in (optimizer, sgd):
            each.zero_grad()
        backward(model, number)
        backward(plain, number)
        for own, value in zip(master, model.parameters(), strict=True):
            own -= 1e-5 * value.grad.float()
        optimizer.step()
        sgd.step()
        assert equal(rounded(optimizer.flat), values(model))
    expected = torch.cat([own.flatten() for own in master])
    torch.testing.assert_close(torch.from_numpy(optimizer.flat.params), expected, rtol=0, atol=1e-7)
    before = Mixed().first.weight.detach()
    assert (plain.first.weight == before).sum() > 0.9 * before.numel()
    assert (expected[: before.numel()] != before.float().flatten()).sum() > 0.9 * before.numel()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_under_every_strategy_parameters_hold_the_master_copy_rounded(strategy):
    model, optimizer = start(strategy, Mixed(), momentum=0.5)
    flat = optimizer.flat
    for number in range(8):
        step(model, optimizer, number)
        assert equal(values(model), rounded(flat))
        if number == 3:
            own = values(model)
            with optimizer.consensus():
                assert equal(values(model), rounded(flat))
            assert equal(values(model), own)
            optimizer.sync()
    optimizer.finish()
    assert equal(values(model), rounded(flat))
    assert [p.dtype for p in model.parameters()] == [p.dtype for p in Mixed().parameters()]
    assert not equal(values(model), values(Mixed()))
    model.load_state_dict(Mixed().state_dict())
    optimizer.finish()
    assert equal(values(model), values(Mixed()))  # it is the script's own now


@pytest.mark.parametrize("piece", [7, torch_flat.PIECE])
def test_a_step_keeps_what_the_parameters_cannot_hold(piece, monkeypatch):
    """As it comes from other ranks, in a mean of replicas; in pieces, so that no second model is in memory."""
    monkeypatch.setattr(torch_flat, "PIECE", piece)
    model, optimizer = start("local_sgd(100)", Mixed(), lr=0.25)
    flat = optimizer.flat
    flat.params += np.random.default_rng(0).normal(0, 1e-4, len(flat.params)).astype(np.float32)
    optimizer.sync()
    beyond = flat.params - np.concatenate([v.float().flatten().numpy() for v in values(model)])
    assert np.count_nonzero(beyond) > len(beyond) / 2
    backward(model, 0)
    plain = copy.deepcopy(model)
    backward(plain, 0)
    torch.optim.SGD(plain.parameters(), lr=0.25).step()
    optimizer.step()
    expected = np.concatenate([v.float().flatten().numpy() for v in values(plain)])
    for part, entry in zip(flat.schema.slices, flat.schema.entries, strict=True):
        assert np.array_equal(flat.params[part], expected[part] + (beyond[part] if entry.dtype else 0))


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("through", [True, False], ids=["data", "counted"])
def test_a_change_of_a_narrow_parameter_is_found_and_taken_up(through, away, monkeypatch):
    if away:
        monkeypatch.setattr(torch_flat, "native", lambda flat: flat.as_subclass(Elsewhere))
    model, optimizer = start("all_reduce", Mixed())
    step(model, optimizer)
    with torch.no_grad():
        (model.last.bias.data if through else model.last.bias)[0] = 3
    with pytest.raises(ConfigurationError, match=r"was changed between two steps" if through else "last.bias was"):
        step(model, optimizer)
    with torch.no_grad():
        model.last.bias[0] = 3
    optimizer.sync()
    assert model.last.bias[0] == 3
    step(model, optimizer, 1)
    model.last.bias.data = model.last.bias.data.clone() + 1
    with pytest.raises(ConfigurationError, match=r"last.bias was changed between two steps"):
        step(model, optimizer)
    expected = model.last.bias.detach().clone()
    optimizer.sync()
    assert torch.equal(model.last.bias, expected)
    step(model, optimizer, 2)
    optimizer.finish()


def test_another_dtype_after_distribute_is_refused_by_name():
    model, optimizer = start("all_reduce", Mixed())
    step(model, optimizer)
    model.last.float()
    with pytest.raises(ConfigurationError, match=r"last.weight was changed between two steps"):
        optimizer.step()


def test_a_value_that_a_narrow_parameter_cannot_hold_is_told():
    """65,504 is the largest float16."""
    _, optimizer = start("local_sgd(100)", Mixed(torch.float16))
    optimizer.flat.params[:] = 7e4
    with pytest.warns(RuntimeWarning, match="not finite after step 0, the first is first.weight"):
        optimizer.loop._note()
    assert np.isfinite(optimizer.flat.params).all()


def resumed(load_master: bool) -> tuple[nn.Module, list[torch.Tensor]]:
    """A model that went on after four steps from what a file would hold, and one that was never stopped."""
    model, optimizer = start("ps(bsp)", Mixed(), lr=0.003)
    for number in range(4):
        step(model, optimizer, number)
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    for number in range(4, 8):
        step(model, optimizer, number)
    other = Mixed(seed=1)
    other.load_state_dict(saved["model"])
    again, optimizer = start("ps(bsp)", other, lr=0.003)
    if load_master:
        optimizer.load_state_dict(saved["optimizer"])
        with pytest.raises(ConfigurationError, match=r"call optimizer.sync\(\)"):
            optimizer.step()
        optimizer.sync()
    for number in range(4, 8):
        step(again, optimizer, number)
    return again, values(model)


def test_the_state_holds_the_master_copy():
    """With the negative control: from the parameters alone, a run goes on with what they hold."""
    model, expected = resumed(load_master=True)
    assert equal(values(model), expected)
    model, expected = resumed(load_master=False)
    assert not equal(values(model), expected)


def test_a_master_copy_of_another_model_is_refused():
    _, optimizer = start("all_reduce", Mixed())
    state = optimizer.state_dict()
    assert {name: value.dtype for name, value in state["master"].items()} == dict.fromkeys(
        ["first.weight", "first.bias", "last.weight", "last.bias"], torch.float32
    )
    state["master"].pop("first.bias")
    with pytest.raises(ConfigurationError, match=r"must match the model, with first.bias as \(8,\), got none"):
        optimizer.load_state_dict(state)
    assert "master" not in start()[1].state_dict()


def test_a_master_copy_is_in_no_state_that_a_plain_optimizer_cannot_load():
    model, optimizer = start("all_reduce", Mixed(), momentum=0.9)
    step(model, optimizer)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain.load_state_dict(optimizer.state_dict())
    assert {name for state in plain.state.values() for name in state} == {"momentum_buffer"}


@pytest.mark.parametrize("strategy", ["all_reduce", "local_sgd(2)", "easgd(2)", "ps(ssp(1))"])
def test_a_declared_job_trains_the_master_copy(strategy):
    """In virtual time every replica is a master copy, and gradients are those of the module at its rounded values."""
    random = np.random.default_rng(0)
    x = random.normal(size=(64, 4)).astype(np.float32)
    data = Data(x, x[:, :2], x, x[:, :2])
    error = nn.functional.mse_loss
    job = Job(Mixed, lambda: data, "sgd(lr=0.1)", error, lambda outputs, y: -float(error(outputs, y)))
    engine = TorchEngine(job, 0)
    params = engine.initial() + random.normal(0, 1e-3, engine.schema.size).astype(np.float32)
    out, many = np.empty_like(params), np.empty((2, len(params)), np.float32)
    loss = engine.gradient(params, np.arange(8), out)
    model = Mixed()
    for view, p in zip(engine.flat.views(torch.from_numpy(params)), model.parameters(), strict=True):
        p.data.copy_(view)
    own = error(model(torch.from_numpy(x[:8])), torch.from_numpy(x[:8, :2]))
    own.backward()
    assert np.array_equal(out, np.concatenate([p.grad.float().flatten().numpy() for p in model.parameters()]))
    assert loss == own.item()
    losses = engine.gradients(np.stack([params, params]), np.stack([np.arange(8)] * 2), many, [0, 1], [0, 0])
    np.testing.assert_allclose(losses, loss, rtol=0.02)
    assert np.linalg.norm(many - out) < 0.1 * np.linalg.norm(out)
    run = run_strategy(strategy, 2, 12, job=job, engine=TorchEngine)
    assert engine.evaluate(run.replicas[0]).loss < 0.8 * engine.evaluate(engine.initial()).loss


def test_gradients_that_are_made_anew_are_read():
    """After zero_grad(set_to_none=True) on the module, and into the flat array of their runs alone."""
    model, same = Mixed(), Mixed()
    flat = FlatModule(model)
    flat.grads[:] = 99
    model.zero_grad(set_to_none=True)
    backward(model, 0)
    backward(same, 0)
    expected = np.concatenate([p.grad.float().flatten().numpy() for p in same.parameters()])
    assert np.array_equal(flat.gather_gradients(), expected)
    backward(model, 0)
    backward(same, 0)
    version = flat.gradient_version
    with torch.no_grad():
        model.last.bias.grad.zero_()
    assert flat.gradient_version > version
    expected = np.concatenate([p.grad.float().flatten().numpy() for p in same.parameters()])
    expected[-2:] = 0
    assert np.array_equal(flat.gather_gradients(), expected)


def scaled_step(model: nn.Module, strategy: str) -> None:
    """A step along gradients that float16 holds only as long as they are scaled."""
    _, optimizer = start(strategy, model, lr=1e4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    scaler.scale(model(torch.ones(8, 4)).sum() * 1e-8).backward()
    scaler.step(optimizer)
    optimizer.finish()


def test_a_gradient_scaler_is_refused_where_float16_would_round_unscaled_gradients():
    """Servers unscale gradients and step in the dtype of the master copy."""
    for model, strategy in (
        (KINDS["float16-float32"](), "all_reduce"),
        (Mixed(torch.float16, torch.float16), "ps(bsp)"),
    ):
        with pytest.raises(ConfigurationError, match=r"weight in float16; keep parameters in float32 under autocast"):
            scaled_step(model, strategy)
    model = KINDS["float16-float32"]()
    before = values(model)
    scaled_step(model, "ps(bsp)")
    assert not torch.equal(model.last.weight, before[-2])
    bfloat = Mixed()
    before = values(bfloat)
    scaled_step(bfloat, "all_reduce")
    assert not torch.equal(bfloat.last.weight, before[-2])


def test_a_master_copy_goes_with_the_model_that_it_was_saved_with():
    """Else the narrower parameters would be one checkpoint's and the others another's."""
    _, optimizer = start("all_reduce", Mixed(seed=1))
    saved = optimizer.state_dict()
    model, optimizer = start("all_reduce", Mixed(seed=2))
    before = values(model)
    with pytest.raises(ConfigurationError, match=r"got other values for first.weight; load the model first"):
        optimizer.load_state_dict(saved)
    assert equal(values(model), before)
    model.load_state_dict(Mixed(seed=1).state_dict())
    optimizer.load_state_dict(saved)
    optimizer.sync()
    step(model, optimizer)


def test_a_state_taken_after_the_script_changed_the_model_is_of_the_changed_model():
    model, optimizer = start("ps(bsp)", Mixed(), lr=0.003)
    step(model, optimizer)
    optimizer.finish()
    own = optimizer.flat.master()
    assert any(not torch.equal(own[name], p.float()) for name, p in model.named_parameters() if name in own)
    with torch.no_grad():
        model.last.weight.fill_(7)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert (saved[1]["master"]["last.weight"] == 7).all()
    assert torch.equal(saved[1]["master"]["first.weight"], own["first.weight"])
    other = Mixed(seed=3)
    other.load_state_dict(saved[0])
    again, optimizer = start("ps(bsp)", other)
    optimizer.load_state_dict(saved[1])
    optimizer.sync()
    assert equal(values(again), values(model))


def test_what_a_hook_prunes_is_zero_in_the_master_copy():
    model, optimizer = start("local_sgd(100)", Mixed(), lr=0.25)
    flat = optimizer.flat
    flat.params += np.random.default_rng(0).normal(0, 1e-4, len(flat.params)).astype(np.float32)
    optimizer.sync()

    def prune(*_):
        with torch.no_grad():
            model.first.weight[:, 0] = 0

    optimizer.inner.register_step_post_hook(prune)
    step(model, optimizer)
    weight = flat.master()["first.weight"]
    assert not weight[:, 0].any()
    assert (weight[:, 1:] != model.first.weight[:, 1:].float()).any()


def trained_by_servers(
    narrow: torch.dtype, kind: Any, batches: range, saved: tuple[dict, dict] | None = None
) -> tuple[nn.Module, Any]:
    """Small gradients, whose squares are zero in float16."""
    model = Mixed(narrow)
    if saved:
        model.load_state_dict(saved[0])
    optimizer = flockstep.distribute(model, kind(model.parameters(), lr=1e-3), "ps(bsp)")
    if saved:
        optimizer.load_state_dict(saved[1])
        optimizer.sync()
    for number in batches:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        ((model(x) - x[:, :2]).square().mean() * 0.003).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize(
    ("narrow", "kind"),
    [
        (torch.float16, torch.optim.Adam),
        (torch.bfloat16, torch.optim.AdamW),
        (torch.float16, torch.optim.NAdam),
        (torch.bfloat16, torch.optim.Adagrad),
    ],
)
def test_a_state_holds_what_servers_remember_unrounded(narrow, kind, ended, tmp_path):
    """A run that goes on from a file equals one that was never stopped, and what would round the state is refused."""
    model, optimizer = trained_by_servers(narrow, kind, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    squares = [slots.get("exp_avg_sq", slots.get("sum")) for slots in saved[1]["state"].values()]
    assert any(not square.to(narrow).equal(square) for square in squares)
    if ended:
        optimizer.finish()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    torch.save(saved, tmp_path / "file")
    whole, _ = trained_by_servers(narrow, kind, range(6))
    again, optimizer = trained_by_servers(narrow, kind, range(3, 6), torch.load(tmp_path / "file"))
    assert equal(values(again), values(whole))
    other = flockstep.distribute(again, kind(again.parameters()), "all_reduce")
    with pytest.raises(
        ConfigurationError, match=r"as servers store it, but this optimizer would round it to b?float16"
    ):
        other.load_state_dict({**saved[1], "master": other.state_dict()["master"]})
    inner = kind(again.parameters())
    inner.load_state_dict(saved[1])
    with pytest.raises(ConfigurationError, match=r"first.weight is rounded to b?float16; after flockstep"):
        flockstep.distribute(again, inner, "ps(bsp)")
