"""Models that are not an nn.Sequential: cut where one tensor passes on, with the bits of the module."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flockstep.errors import ConfigurationError
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.torch_layers import shape_of
from flockstep.partitions.pipeline import Pipeline
from flockstep.split.splitting import make_split, without_whole
from flockstep.split.torch_trace import traced_chain
from flockstep.workloads.models import Transformer

SCALE = 1.5


class Residual(nn.Module):
    """Two branches that meet, around a part of the model that no tracer can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), Depends(), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, twice: bool = True) -> Tensor:
        y = self.first(x)
        y = y + self.inner(y) * self.scale
        for _ in range(2 if twice else 1):
            y = y + y.tanh()
        out: Tensor = self.last(y * self.scale)
        return out


class Depends(nn.Module):
    """Operations that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) if x.sum() > 0 else -self.layer(x)
        return out


def test_the_units_of_a_gpt_compute_what_it_computes() -> None:
    torch.manual_seed(0)
    gpt = Transformer(11, 5, 8, 2, 2, tied=False)
    units = traced_chain(gpt, "gpt")
    names = [unit.name for unit in units if unit.trained]
    assert names == [
        *("embedding", "position"),
        *("blocks.0.norm_1", "blocks.0.norm_2", "blocks.1.norm_1", "blocks.1.norm_2"),
        *("norm", "head"),
    ], "one unit for each residual branch"
    x = between = torch.randint(0, 11, (3, 5))
    for unit in units:
        between = unit.module(between)
    assert torch.equal(between, gpt(x))
    named = [unit.named(name) for unit in units for name, _ in unit.module.named_parameters()]
    assert sorted(named) == sorted(name for name, _ in gpt.named_parameters())


def test_each_counted_layer_is_in_one_unit() -> None:
    from flockstep.split.torch_chain import layers_within

    gpt = Transformer(11, 5, 8, 2, 2, tied=False)
    shape = shape_of(gpt, torch.randint(0, 11, (3, 5)))
    found = [layer.name for unit in traced_chain(gpt, "gpt") for layer in layers_within(shape, unit)]
    assert sorted(found) == sorted(layer.name for layer in shape.layers)


def test_branches_stay_together_and_what_cannot_be_traced_is_one_operation() -> None:
    torch.manual_seed(0)
    model = Residual()
    units = traced_chain(model, "job")
    assert [unit.name for unit in units if unit.trained][:2] == ["first", "inner"]
    for sign in (1, -1):
        x = between = sign * torch.rand(3, 4)
        for unit in units:
            between = unit.module(between)
        assert torch.equal(between, model(x))
    shared = [unit.name for unit in units if any(one is model.scale for one in unit.module.parameters())]
    assert len(shared) == 2, "both units hold the one parameter"


class TwoInputs(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Unused(nn.Linear):
    """A layer of the user, with a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.spare = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class ByValue(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if math.isfinite(x.sum()) else -x


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (TwoInputs(), "must have one input, got 2 for TwoInputs of job"),
        (Unused(), "'spare' of job is not; remove it, or freeze it"),
        (
            ByValue(),
            "must be an nn.Sequential, or have a forward pass that torch.fx can trace, .* got ByValue: .+; build",
        ),
    ],
)
def test_what_cannot_be_cut_says_why(model: nn.Module, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        traced_chain(model, "job")


class Effects(nn.Module):
    """A running mean in a buffer, and a count in an attribute."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        self.calls += 1
        out: Tensor = self.layer(x) / self.calls
        return out


def test_a_module_with_side_effects_has_them_in_every_call() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Effects(), nn.Linear(4, 2))
    traced, effects = traced_chain(_Around(model), "job"), model[1]
    assert isinstance(effects, Effects)
    assert (effects.calls, effects.mean.tolist()) == (0, [1.0] * 4), "tracing leaves the module as it was"
    x, expected = torch.rand(3, 4), torch.ones(4)
    for call in range(1, 4):
        between = x
        for unit in traced:
            between = unit.module(between)
        assert effects.calls == call
        expected = expected / 2 + model[0](x).mean(0)
    assert torch.allclose(effects.mean, expected)


class _Around(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), random.random, np.random.rand])
def test_a_model_that_draws_random_numbers_itself_is_refused(draw: Callable[[], float]) -> None:
    class LayerDrop(_Around):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.inside(x) if draw() < 2 else x

    with pytest.raises(ConfigurationError, match="forward of LayerDrop draws random numbers while it is traced"):
        traced_chain(LayerDrop(nn.Linear(4, 4)), "job")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda model: setattr(model, "calls", model.calls + 1), "calls"),
        (lambda model: model.mean.mul_(0.5), "mean"),
        (lambda model: setattr(model.inside, "calls", 1), "calls"),
    ],
)
def test_a_count_that_a_graph_would_freeze_is_refused_and_undone(
    change: Callable[[nn.Module], object], name: str
) -> None:
    class Counts(_Around):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 4))
            self.calls = 0
            self.register_buffer("mean", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            change(self)
            return self.inside(x)  # type: ignore[no-any-return]

    model = Counts()
    with pytest.raises(ConfigurationError, match=f"forward of Counts changes {name} while it is traced"):
        traced_chain(model, "job")
    assert (model.calls, model.get_buffer("mean").tolist(), hasattr(model.inside, "calls")) == (0, [1.0] * 4, False)


def test_a_constraint_on_weights_that_a_graph_would_leave_out_is_refused() -> None:
    class Assigns(_Around):
        def forward(self, x: Tensor) -> Tensor:
            self.inside.weight.data = torch.renorm(self.inside.weight.data, 2, 0, 1.0)  # type: ignore[operator, arg-type]
            return self.inside(x)  # type: ignore[no-any-return]

    with pytest.raises(ConfigurationError, match="got Assigns: forward assigns the attribute 'data' of a tensor"):
        traced_chain(Assigns(nn.Linear(4, 4)), "job")


def test_a_model_that_sets_an_attribute_to_the_value_it_has_is_traced() -> None:
    class Reads(_Around):
        def forward(self, x: Tensor) -> Tensor:
            self.scale = SCALE
            return self.inside(x) * self.scale  # type: ignore[no-any-return]

    model = Reads(nn.Linear(4, 4))
    model.scale = SCALE
    x = between = torch.rand(3, 4)
    for unit in traced_chain(model, "job"):
        between = unit.module(between)
    assert torch.equal(between, model(x))


X, Y = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32), np.arange(32) % 2


def _job(model: Callable[[], nn.Module], data: Callable[[], Data] = lambda: Data(X, Y, X, Y)) -> Job:
    return Job(name="hooked", model=model, data=data, loss=nn.functional.cross_entropy, batch=8, optimizer="sgd")


class Hooked(_Around):
    """A hook, which only the whole model runs, changes a buffer."""

    def __init__(self, buffer: str) -> None:
        super().__init__(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
        self.register_buffer("count", torch.zeros(()))
        self.register_forward_hook(lambda *_: self.get_buffer(buffer).add_(1) and None)


@pytest.mark.parametrize("buffer", ["count", "inside.1.num_batches_tracked"])
def test_buffers_that_only_the_whole_model_changes_are_refused(buffer: str) -> None:
    with pytest.raises(ConfigurationError, match=r"must compute what .*, got changing buffers that differ by 1;"):
        make_split(_job(lambda: Hooked(buffer)), 0, Pipeline(2))


def test_data_that_depend_on_the_models_random_numbers_need_the_whole_model() -> None:
    def data() -> Data:
        noisy = torch.where(torch.rand(32) < 0.01, 1 - torch.tensor(Y), torch.tensor(Y)).numpy()
        return Data(X, noisy, X, Y)

    job = _job(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), data)
    facts = without_whole(job, 0, make_split(job, 0, Pipeline(2))).facts
    assert facts.obstacle.startswith("data drawn with torch's random numbers")
