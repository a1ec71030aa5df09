"""Which part of a module belongs to one of several optimizers."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from flockstep.errors import ConfigurationError  # noqa: E402
from flockstep.runtime.torch_parts import distribute_part, part_of  # noqa: E402
from flockstep.strategies.base import Strategy  # noqa: E402


def whole() -> nn.Module:
    module = nn.Module()
    module.one = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    module.other = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    return module


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for each in modules for p in each.parameters()], lr=0.1)


def test_all_parameters_are_the_module() -> None:
    module = whole()
    assert part_of(module, sgd(module)) is module


def test_frozen_parameters_belong_to_no_optimizer() -> None:
    module = whole()
    module.one.requires_grad_(False)
    assert part_of(module, sgd(module.other)) is module


def test_a_submodule_is_found_with_its_buffers() -> None:
    module = whole()
    assert part_of(module, sgd(module.one)) is module.one
    assert part_of(module, sgd(module.other[0])) is module.other[0]


def test_several_submodules_make_a_list() -> None:
    module = whole()
    found = part_of(module, sgd(module.one, module.other[1]))
    assert list(found.children()) == [module.one, module.other[1]]


def test_half_a_layer_is_refused() -> None:
    module = whole()
    with pytest.raises(ConfigurationError, match=r"holds other\.0\.weight but not one\.0\.weight; make a submodule"):
        part_of(module, torch.optim.SGD([module.other[0].weight], lr=0.1))
    with pytest.raises(ConfigurationError, match="holds none of them but not"):
        part_of(module, sgd(nn.Linear(2, 2)))


def test_an_optimizer_of_several_modules_trains_all_of_them() -> None:
    one, other, third = whole(), nn.Linear(2, 2), nn.Linear(2, 2)
    made = distribute_part([one, third, other], sgd(one, other), Strategy.parse("all_reduce"))
    assert sum(p.numel() for p in made.flat.parameters) == sum(
        p.numel() for each in (one, other) for p in each.parameters()
    )
    made.finish()


def test_an_optimizer_of_no_module_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="set up the module before its optimizer"):
        distribute_part([whole()], sgd(nn.Linear(2, 2)), Strategy.parse("all_reduce"))
