"""`flockstep.clip_grad_norm_` beside torch's own: what it returns and when, skipped steps, and after the run."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import flockstep  # noqa: E402
from flockstep.frameworks.torch_flat import FlatModule  # noqa: E402
from flockstep.runtime.torch_backward import GradientChangeDetector  # noqa: E402
from flockstep.runtime.torch_clipping import Clipping  # noqa: E402
from flockstep.strategies.base import Strategy  # noqa: E402

STRATEGIES = ["all_reduce", "local_sgd", "bucketed(cap=0.00008, first=0.00004)", "bsp", "asgd"]


def model_and_optimizer(strategy: str = "all_reduce") -> tuple[nn.Linear, Any]:
    torch.manual_seed(3)
    model = nn.Linear(4, 2)
    return model, flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01), strategy)


def backward(model: nn.Module, scale: float = 1.0) -> torch.Tensor:
    (scale * model(torch.ones(1, 4)).square().sum()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("of_parameters", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_worker_knows_the_norm_at_once(strategy: str, of_parameters: bool) -> None:
    """So that a script may skip a step where it is not finite, as it does with torch's own."""
    model, optimizer = model_and_optimizer(strategy)
    expected = backward(model).norm()
    norm = flockstep.clip_grad_norm_(list(model.parameters()) if of_parameters else optimizer, 0.01)
    torch.testing.assert_close(norm, expected)
    before = model.weight.detach().clone()
    optimizer.step()
    optimizer.finish()
    moved = (model.weight - before).norm()
    assert 0 < moved <= 0.01 * 0.01 * 1.001, "it was clipped"


def test_a_norm_is_not_a_number_until_the_step() -> None:
    model = nn.Linear(2, 1, bias=False)
    clipping = Clipping(FlatModule(model), Strategy.parse("all_reduce"), alone=False)
    norm = clipping.ask([model.weight], 0.1, 2.0, False)
    assert math.isnan(norm)
    clipping.begin()
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    clipping.apply()
    assert norm == 5


@pytest.mark.parametrize("by_module", [False, True])
def test_a_step_that_is_skipped_forgets_its_clip(by_module: bool) -> None:
    model = nn.Linear(2, 1, bias=False)
    clipping = Clipping(FlatModule(model), Strategy.parse("all_reduce"), alone=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clipping.ask([model.weight], 0.1, 2.0, False)
        clipping.ask([model.weight], 0.1, 2.0, False) if by_module else clipping.skip()
        clipping.skip()
        clipping.begin()
        model.weight.grad = torch.tensor([[3.0, 4.0]])
        clipping.apply()
    assert model.weight.grad.tolist() == [[3.0, 4.0]], "what was asked for a skipped step does not clip the next"


def test_a_script_whose_condition_on_the_norm_skips_every_step_is_told() -> None:
    model = nn.Linear(2, 1, bias=False)
    clipping = Clipping(FlatModule(model), Strategy.parse("all_reduce"), alone=False)

    def train() -> None:
        for _ in range(10):
            clipping.skip()  # by zero_grad
            if torch.isfinite(clipping.ask([model.weight], 0.1, 2.0, False)):
                clipping.begin()

    with pytest.warns(UserWarning, match=r"NaN until step\(\), so a condition on it") as told:
        train()
    assert len(told) == 1


@pytest.mark.parametrize("strategy", ["all_reduce", "bsp"])
def test_zero_grad_skips(strategy: str) -> None:
    model, optimizer = model_and_optimizer(strategy)
    backward(model)
    flockstep.clip_grad_norm_(optimizer, 1e-6)
    optimizer.zero_grad()
    gradient = backward(model)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer.step()
    optimizer.finish()
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(after, before - 0.01 * gradient)


@pytest.mark.parametrize("of_parameters", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_after_the_run_gradients_are_clipped_at_once(strategy: str, of_parameters: bool) -> None:
    """The gradients of a model that goes on training, with an optimizer of its own, are nobody else's."""
    model, optimizer = model_and_optimizer(strategy)
    backward(model)
    optimizer.step()
    optimizer.finish()
    optimizer.zero_grad()
    expected = backward(model).norm()
    norm = flockstep.clip_grad_norm_(model.parameters() if of_parameters else optimizer, 0.01)
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in model.parameters()]).norm(), torch.tensor(0.01))


@pytest.mark.parametrize("strategy", ["all_reduce", "local_sgd"])
def test_error_if_nonfinite_is_torchs_and_the_run_goes_on(strategy: str) -> None:
    model, optimizer = model_and_optimizer(strategy)
    backward(model, 1e30)
    with pytest.raises(RuntimeError, match="non-finite"):
        flockstep.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    optimizer.finish()


def test_a_combined_gradient_whose_norm_overflows_is_not_stepped_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is known inside step(), on every worker alike, which raises once the strategy has done its part."""
    model, optimizer = model_and_optimizer()
    monkeypatch.setattr(optimizer.clipping, "_alone", False)
    before = model.weight.detach().clone()
    for _ in range(2):
        backward(model, 1e30)
        flockstep.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
        with pytest.raises(RuntimeError, match="non-finite"):
            optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model.weight, before)
    backward(model)
    optimizer.step()
    assert not torch.equal(model.weight, before)
    optimizer.finish()


@pytest.mark.parametrize("how", ["replaced", "written", "none"])
def test_a_gradient_that_was_replaced_after_backward_is_told_as_one_written_to(how: str) -> None:
    model = nn.Linear(2, 1, bias=False)
    watch = GradientChangeDetector(FlatModule(model), Strategy.parse("all_reduce"), combined=True)
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
    if how == "replaced":
        model.weight.grad = model.weight.grad * 0.5
    elif how == "written":
        model.weight.grad.mul_(0.5)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        watch.check()
    assert len(told) == (how != "none")
