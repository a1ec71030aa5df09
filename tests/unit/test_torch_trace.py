"""Models that are not an nn.Sequential: cut where one tensor passes on, with the bits of the module."""

from __future__ import annotations

import array
import functools
import itertools
import math
import random
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flockstep.errors import ConfigurationError
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.job import make_split, without_whole
from flockstep.frameworks.torch_effects import StateSnapshot
from flockstep.frameworks.torch_layers import shape_of
from flockstep.frameworks.torch_trace import traced_chain
from flockstep.partitions.pipeline import Pipeline
from flockstep.workloads.models import Transformer


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
    from flockstep.frameworks.torch_chain import layers_within

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


class Counts:
    """Where models count their calls."""

    __slots__ = ("calls",)
    all_calls = 0

    def __init__(self) -> None:
        self.calls = 0


CALLS = 0
BY_NAME = 0
NOTED: list[int] = []
HELD = [{"counts": [Counts()]}]
RECORD = types.SimpleNamespace(calls=0)
WORDS = array.array("l", [0])
OTHER = types.ModuleType("python_module_of_a_user")
OTHER.inner = types.ModuleType("python_module_of_a_user.inner")


class Calls(_Around):
    inherited = 0


class Late(Calls):
    """A model that computes something else from its 100th call on."""

    of_class = 0
    bound = functools.partial(int, 0)

    def __init__(self, way: str) -> None:
        super().__init__(nn.Linear(4, 4))
        self.way, self.noted, self.named, self.numbers = way, [0], {"calls": 0}, np.zeros(1)
        self.tensors, self.drawn, self.last = [torch.zeros(1)], random.Random(0), deque([0], 1)
        self.legacy, self.enclosed, self.on = np.random.RandomState(0), counter(), False

    def counted(self) -> float:
        """Number of calls so far, or a random number, as the way says."""
        global CALLS
        match self.way:
            case "list":
                self.noted.append(0)
                return len(self.noted)
            case "dict":
                self.named["calls"] += 1
                return self.named["calls"]
            case "array":
                self.numbers += 1
                return float(self.numbers[0])
            case "tensor":
                self.tensors[0] += 1
                return float(self.tensors[0])
            case "shape":
                self.tensors[0].data = torch.ones(2)
                return 2
            case "dtype":
                self.tensors[0].data = self.tensors[0].double()
                return 0
            case "queue":
                self.last.append(self.last[0] + 1)
                return self.last[0]
            case "stream":
                return 100 * self.drawn.random()
            case "legacy stream":
                return min(self.legacy.normal(), 99)  # the second number of a pair is kept
            case "class":
                Late.of_class += 1
                return Late.of_class
            case "inherited":
                type(self).inherited += 1
                return type(self).inherited
            case "bound":
                type(self).bound = functools.partial(int, self.bound() + 1)
                return self.bound()
            case "function":
                vars(note)["calls"] = vars(note).get("calls", 0) + 1
                return float(vars(note)["calls"])
            case "enclosing":
                return self.enclosed()
            case "record":
                RECORD.calls += 1
                return float(RECORD.calls)
            case "typed array":
                WORDS[0] += 1
                return WORDS[0]
            case "memory":
                self.tensors[0].numpy()[:] += 1
                return float(self.tensors[0])
            case "Python module":
                OTHER.inner.calls = getattr(OTHER.inner, "calls", 0) + 1
                return float(OTHER.inner.calls)
            case "name":
                globals()["BY_NAME"] += 1
                return BY_NAME
            case "switch":
                self.on = not self.on
                return 0
            case "global":
                CALLS += 1
                return CALLS
            case "global list":
                note()
                return len(NOTED)
            case _:
                counts = HELD[0]["counts"][0]
                counts.calls += 1
                return counts.calls

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inside(x)
        return out if self.counted() < 100 else -out


def note() -> None:
    NOTED.append(0)


def counter() -> Callable[[], int]:
    """A function that returns the number of its calls."""
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


WAYS = {
    "list": "noted",
    "dict": "named",
    "array": "numbers",
    "tensor": "tensors",
    "queue": "last",
    "stream": "drawn",
    "legacy stream": "legacy",
    "class": "Late.of_class",
    "inherited": "Late.inherited",
    "bound": "Late.bound",
    "function": "global note",
    "enclosing": "variable calls",
    "record": "global RECORD",
    "typed array": "global WORDS",
    "memory": "tensors",
    "shape": "tensors",
    "dtype": "tensors",
    "Python module": "global calls",
    "name": "global BY_NAME",
    "switch": "on, __dict__",
    "global": "global CALLS",
    "global list": "global NOTED",
    "held": "global HELD.*calls",
}


@pytest.mark.parametrize(("way", "title"), WAYS.items())
def test_state_that_a_traced_model_changes_is_found(way: str, title: str) -> None:
    """A graph would have the state of the trace in every call, and the comparison with the model sees one call only."""
    model = Late(way)
    with pytest.raises(ConfigurationError, match=f"forward of Late changes {title} while it is traced"):
        traced_chain(model, "job")
    assert (CALLS, NOTED, HELD[0]["counts"][0].calls, Late.of_class) == (0, [], 0, 0)
    assert (BY_NAME, RECORD.calls, WORDS[0], model.enclosed(), model.on) == (0, 0, 0, 1, False)
    assert (Late.bound(), vars(note), hasattr(OTHER.inner, "calls"), "inherited" in vars(Late)) == (0, {}, False, False)
    assert (model.noted, model.named["calls"], list(model.last)) == ([0], 0, [0]), "as before the trace"
    assert (model.numbers[0], model.tensors[0], model.tensors[0].dtype) == (0, 0, torch.float32)
    assert model.drawn.random() == random.Random(0).random()
    assert model.legacy.normal() == np.random.RandomState(0).normal()


def test_state_that_cannot_be_equal_to_itself_does_not_change() -> None:
    module = nn.Module()
    module.words, module.tensor = array.array("d", [math.nan]), torch.tensor([math.nan])
    with warnings.catch_warnings(action="ignore"):
        module.nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    assert not StateSnapshot(module).changed


def test_state_that_a_module_inside_changes_changes_in_every_call() -> None:
    late = Late("list")
    for unit in traced_chain(_Around(late), "job") * 3:
        unit.module(torch.rand(3, 4))
    assert len(late.noted) == 4


class Watches(_Around):
    """A model that reads what a module inside changes."""

    inside: Late

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inside(x)
        return out if len(self.inside.noted) < 100 else -out


class WatchesNorm(_Around):
    inside: nn.BatchNorm1d

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inside(x)
        assert self.inside.num_batches_tracked is not None
        return out if self.inside.num_batches_tracked < 100 else -out


class Assigns(_Around):
    """A constraint on weights, which a graph would leave out."""

    inside: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        self.inside.weight.data = torch.renorm(self.inside.weight.data, 2, 0, 1.0)
        return self.inside(x)  # type: ignore[no-any-return]


class Steps(_Around):
    def __init__(self, inside: nn.Module, numbers: Iterator[float]) -> None:
        super().__init__(inside)
        self.numbers = numbers

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x) * next(self.numbers)  # type: ignore[no-any-return]


class Draws(_Around):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__(inside)
        self.draw = np.random.RandomState(0).random_sample

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inside(x)
        return out if self.draw() < 2 else -out


TAKES = "forward of Steps may take elements from the iterator in numbers, which tracing cannot put back"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Watches(Late("list")), "reads noted, which a module inside changes in every call"),
        (WatchesNorm(nn.BatchNorm1d(4)), "got WatchesNorm: symbolically traced variables cannot be used as inputs to"),
        (Assigns(nn.Linear(4, 4)), "got Assigns: forward assigns the attribute 'data' of a tensor"),
        (Steps(nn.Linear(4, 4), itertools.count()), TAKES),
        (Steps(nn.Linear(4, 4), itertools.chain(itertools.repeat(1, 100), itertools.count())), TAKES),
        (Steps(nn.Linear(4, 4), (1 + call // 100 for call in itertools.count())), TAKES),
        (Draws(nn.Linear(4, 4)), "forward of Draws changes draw while it is traced"),
    ],
)
def test_state_that_a_graph_would_freeze_is_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        traced_chain(model, "job")


@pytest.mark.parametrize("elements", [itertools.count(), iter(range(9)), (call for call in itertools.count())])
def test_a_module_inside_takes_one_element_of_its_iterator_in_every_call(elements: Iterator[int]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Steps(nn.Linear(4, 4), elements))
    x, units = torch.rand(3, 4), traced_chain(_Around(model), "job")
    for call in range(3):
        between = x
        for unit in units:
            between = unit.module(between)
        assert torch.equal(between, call * model[1].inside(model[0](x)))


def test_a_model_that_only_reads_state_is_traced() -> None:
    class Reads(_Around):
        scale: tuple[float, int]

        def forward(self, x: Tensor) -> Tensor:
            self.scale = math.sqrt(2.0), 1
            return self.inside(x) * self.scale[0] + len(NOTED)  # type: ignore[no-any-return]

    model = Reads(nn.Linear(4, 4))
    model.scale = math.sqrt(2.0), 1
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


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        ("count", "must be used by a layer, got 'count' of job 'hooked', which the layers"),
        ("inside.1.num_batches_tracked", "change the buffers as the model changes them, got values .* by 1;"),
    ],
)
def test_buffers_that_only_the_whole_model_changes_are_refused(buffer: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_split(_job(lambda: Hooked(buffer)), 0, Pipeline(2))


def test_data_that_depend_on_the_models_random_numbers_need_the_whole_model() -> None:
    def data() -> Data:
        noisy = torch.where(torch.rand(32) < 0.01, 1 - torch.tensor(Y), torch.tensor(Y)).numpy()
        return Data(X, noisy, X, Y)

    job = _job(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), data)
    facts = without_whole(job, 0, make_split(job, 0, Pipeline(2))).facts
    assert facts.obstacle.startswith("data drawn with torch's random numbers")


IDS = itertools.count()


class Named(_Around):
    """A model whose constructor numbers its instances. Forward takes elements as `way` says."""

    ids = itertools.count()
    draw = itertools.count().__next__
    others = ids

    def __init__(self, way: str = "") -> None:
        super().__init__(nn.Linear(4, 4))
        self.way, self.second = way, nn.Linear(4, 4)
        self.name, self.number, self.drawn = next(self.ids), next(IDS), Named.draw()
        self.rest = [iter(range(9))]
        self.alias = self.rest

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.inside(x) + 0.1 * self.name).relu()
        match self.way:
            case "next":
                return out * next(self.ids)
            case "for":
                for number in Named.ids:
                    return out * number
            case "zip":
                return out * next(zip(self.ids, [0], strict=False))[0]
            case "global":
                return out * next(IDS)
            case "method":
                return out * Named.draw()
            case "alias of a class":
                return out * next(self.others)
            case "list":
                return out * next(self.rest[0])
            case "alias of a list":
                return out * next(self.alias[0])
            case "caught":
                try:
                    return out * next(self.ids)
                except ConfigurationError:
                    return out
        return out


class Rebinds(Named):
    def forward(self, x: Tensor) -> Tensor:
        Named.ids = itertools.count(5)
        return super().forward(x)


class Default(Named):
    def forward(self, x: Tensor, numbers: Iterator[int] = itertools.count()) -> Tensor:  # noqa: B008
        return super().forward(x)


def test_iterators_that_only_the_constructor_uses_do_not_keep_a_model_whole() -> None:
    model = Named()
    following, of_all, drawn = repr(Named.ids), repr(IDS), Named.draw()
    x = between = torch.rand(3, 4)
    units = traced_chain(model, "job")
    for unit in units:
        between = unit.module(between)
    assert torch.equal(between, model(x))
    assert len(units) > 2
    assert (repr(Named.ids), repr(IDS), Named.draw()) == (following, of_all, drawn + 1), "as before the trace"
    assert model.alias is model.rest


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Named("next"), "forward of Named may take elements from the iterator in Named.ids"),
        (Named("for"), "forward of Named may take elements from the iterator in Named.ids"),
        (Named("zip"), "forward of Named may take elements from the iterator in Named.ids"),
        (Named("global"), "forward of Named may take elements from the iterator in global IDS"),
        (Named("method"), "forward of Named may take elements from the iterator in Named.draw"),
        (Named("alias of a class"), "forward of Named may take elements from the iterator in Named.others"),
        (Named("list"), "forward of Named may take elements from the iterator in rest"),
        (Named("alias of a list"), "forward of Named may take elements from the iterator in alias"),
        (Named("caught"), "forward of Named may take elements from the iterator in Named.ids"),
        (Rebinds(), "forward of Rebinds changes Named.ids while it is traced"),
        (Default(), "forward of Default may take elements from the iterator in"),
    ],
)
def test_iterators_that_forward_uses_are_refused_and_stay_as_they_were(model: Named, message: str) -> None:
    following, of_all, rest = repr(Named.ids), repr(IDS), repr(model.rest[0].__reduce__())
    with pytest.raises(ConfigurationError, match=message):
        traced_chain(model, "job")
    assert (repr(Named.ids), repr(IDS)) == (following, of_all)
    assert repr(model.rest[0].__reduce__()) == rest
