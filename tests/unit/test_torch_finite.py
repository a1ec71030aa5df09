"""A step looks for values that are not finite again only if gradients may have changed since the backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import flockstep  # noqa: E402
from flockstep.errors import Diverged  # noqa: E402


def fill(values: Any) -> None:
    values[-1] = math.nan


def replace(parameter: Any) -> None:
    parameter.grad = torch.full_like(parameter, math.nan)


CHANGES: list[Callable[[Any], None]] = [
    lambda p: fill(p.grad.view(-1)),
    lambda p: p.grad.data.div_(0.0),
    replace,
    lambda p: p.register_hook(lambda gradient: gradient * math.inf),
    lambda p: p.register_post_accumulate_grad_hook(lambda p: fill(p.grad.view(-1))),
]


def large() -> nn.Sequential:
    """A model with more than `LARGE` parameters, and one that no backward pass gives a gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1))
    model.register_parameter("unused", nn.Parameter(torch.ones(16)))
    return model


@pytest.mark.parametrize("strategy", ["all_reduce", "gossip"])
@pytest.mark.parametrize("none", [True, False])
@pytest.mark.parametrize("change", range(len(CHANGES)))
def test_a_large_gradient_that_is_not_finite_is_refused(change: int, none: bool, strategy: str) -> None:
    """Written after the backward pass, or within one."""
    model = large()
    optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-4), strategy)

    def backward() -> None:
        optimizer.zero_grad(set_to_none=none)
        for _ in range(2):  # gradients are accumulated
            model(torch.ones(1, 1024)).sum().backward()

    backward()
    optimizer.step()
    within = change > 2
    if within:
        CHANGES[change](model[0].weight)
    backward()
    if not within:
        CHANGES[change](model[0].weight)
    with pytest.raises(Diverged, match=r"worker 0 must be finite, got (nan|-?inf) in '0.weight' at step 1"):
        optimizer.step()


def test_a_single_value_that_torch_does_not_see_written_is_refused_where_others_read_the_gradient() -> None:
    model = large()
    optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-4), "gossip")
    model(torch.ones(1, 1024)).sum().backward()
    fill(model[0].weight.grad.data.view(-1))
    with pytest.raises(Diverged, match=r"worker 0 must be finite, got nan in '0.weight' at step 0"):
        optimizer.step()


def trained(strategy: str | None, none: bool = True, scale: float = 0.0) -> list[Any]:
    """The parameters after steps with accumulated and clipped gradients, and a step without zero_grad."""
    model = large()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    clip = nn.utils.clip_grad_norm_ if strategy is None else flockstep.clip_grad_norm_
    optimizer = optimizer if strategy is None else flockstep.distribute(model, optimizer, strategy)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 0)
    for number in range(4):
        if number != 2:
            optimizer.zero_grad(set_to_none=none)
        for _ in range(2):
            scaler.scale(model(torch.full((2, 1024), 0.1 * number)).square().mean()).backward()
        if not scale:
            clip(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    if strategy is not None:
        optimizer.finish()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("none", [True, False])
@pytest.mark.parametrize("strategy", ["all_reduce", "local_sgd(2)", "gossip"])
def test_one_worker_with_a_large_model_is_plain_torch(strategy: str, none: bool) -> None:
    assert all(map(torch.equal, trained(strategy, none), trained(None, none)))


def test_gradients_that_lie_elsewhere_are_unscaled() -> None:
    assert all(map(torch.equal, trained("all_reduce", scale=1024.0), trained(None, scale=1024.0)))


@pytest.mark.parametrize(
    ("strategy", "left"),
    [("all_reduce", True), ("local_sgd(2)", True), ("gossip", False), ("all_reduce(codec=half)", False)],
)
def test_gradients_stay_where_autograd_makes_them_if_only_the_optimizer_reads_them(strategy: str, left: bool) -> None:
    model = large()
    optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-4), strategy)
    optimizer.zero_grad()
    model(torch.ones(1, 1024)).sum().backward()
    index = next(i for i, p in enumerate(optimizer.flat.parameters) if p is model[0].weight)
    assert optimizer.flat.in_place(index) is not left
    optimizer.step()
    assert optimizer.flat.in_place(index) is not left
    assert model.unused.grad is None
    optimizer.finish()
    assert optimizer.flat.in_place(index)
