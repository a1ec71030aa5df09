"""Parts of a gradient are handed over while backward runs: when, in which order, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import flockstep
from flockstep.errors import ConfigurationError

SMALL = "bucketed(cap=0.0004, first=0.0002)"  # 100 and 50 elements


class Watched:
    """A model whose optimizer notes what is handed over, and whose parameters note when they are complete."""

    def __init__(self, strategy: str = SMALL, unused: bool = False):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 12), nn.Tanh(), nn.Linear(12, 5))
        if unused:
            self.model.register_module("extra", nn.Linear(3, 3))
        inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.events: list[Any] = []
        for name, parameter in self.model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.events.append(name))
        self.optimizer: Any = flockstep.distribute(self.model, inner, strategy)
        loop = self.optimizer.loop
        hand_over = loop.hand_over

        def noted() -> None:
            self.events.append(loop.awaited)
            hand_over()

        loop.hand_over = noted

    def forward(self) -> torch.Tensor:
        x = torch.ones(4, 10)
        for layer in list(self.model)[:5]:
            x = layer(x)
        return x.square().mean()

    def handed(self) -> list[int]:
        return [event for event in self.events if isinstance(event, int)]


@pytest.fixture
def watched() -> Iterator[Watched]:
    one = Watched()
    yield one
    if one.optimizer.loop._failure is None:
        one.optimizer.finish()


def test_a_part_goes_out_as_soon_as_its_last_parameter_is_complete(watched: Watched) -> None:
    """0: 200 + 20, 2: 240 + 12, 4: 60 + 5 elements from the start; parts of 50, then 100, from the end."""
    watched.forward().backward()
    assert watched.events[:2] in (["4.bias", "4.weight"], ["4.weight", "4.bias"])
    before = {part: watched.events[: watched.events.index(part)] for part in watched.handed()}
    assert watched.handed() == [487, 387, 287, 187, 87]
    assert {"4.weight", "4.bias"} <= set(before[487])
    assert not {"2.weight", "0.weight"} & set(before[487])
    assert "0.weight" not in before[287]
    watched.optimizer.step()
    assert watched.handed() == [487, 387, 287, 187, 87]


def test_the_step_is_that_of_plain_torch(watched: Watched) -> None:
    plain = Watched("all_reduce")
    for _ in range(3):
        for one in (watched, plain):
            one.model.zero_grad()
            one.forward().backward()
            one.optimizer.step()
    assert plain.handed() == []
    assert len(watched.handed()) == 15
    for a, b in zip(watched.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_other_strategies_have_no_hooks_that_hand_parts_over() -> None:
    """The guard has one hook, another is the test's own; gradients of a small model are gathered without."""
    one = Watched("all_reduce")
    assert [len(p._post_accumulate_grad_hooks) for p in one.model.parameters()] == [1] * 5 + [2]
    assert [len(p._post_accumulate_grad_hooks) for p in Watched().model.parameters()] == [2] * 5 + [3]


def test_a_parameter_without_a_gradient_is_completed_by_step() -> None:
    one = Watched(unused=True)
    one.forward().backward()
    assert one.handed() == []  # the unused layer lies at the end of the array
    before = [p.detach().clone() for p in one.model.parameters()]
    one.optimizer.step()
    after = list(one.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before[6:], after[6:], strict=True))
    assert not torch.equal(before[0], after[0])


def test_a_second_backward_before_step_is_refused(watched: Watched) -> None:
    watched.forward().backward()
    with pytest.raises(ConfigurationError, match=r"second gradient before step.*no_sync"):
        watched.forward().backward()


def test_gradients_that_change_after_backward_are_refused(watched: Watched) -> None:
    watched.forward().backward()
    nn.utils.clip_grad_norm_(watched.model.parameters(), 1e-3)
    with pytest.raises(ConfigurationError, match=r"changed between backward\(\) and step\(\).*all_reduce"):
        watched.optimizer.step()


@pytest.mark.parametrize("way", ["data", "numpy"])
def test_changes_that_torch_does_not_count_are_found(watched: Watched, way: str) -> None:
    watched.forward().backward()
    bias = watched.model[2].bias.grad
    array: Any = bias.data if way == "data" else bias.numpy()
    version = bias._version
    array[3] *= 0.5
    assert bias._version == version
    with pytest.raises(ConfigurationError, match=r"changed between backward\(\) and step\(\).*all_reduce"):
        watched.optimizer.step()


def test_of_large_parts_some_elements_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of all elements, as clipping makes it, is found from a few."""
    monkeypatch.setattr("flockstep.runtime.torch_backward.SENT", 2)
    one = Watched()
    one.forward().backward()
    for parameter in one.model.parameters():
        parameter.grad.data *= 0.5
    with pytest.raises(ConfigurationError, match=r"changed between backward\(\) and step\(\)"):
        one.optimizer.step()


class TwiceCheckpointed(nn.Module):
    """A layer that runs twice under activation checkpoints."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant, self.first, self.second = reentrant, nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.second, torch.tanh(self.first(x)), use_reentrant=self.reentrant)
        return x


def test_the_advice_for_a_layer_that_runs_twice_under_a_checkpoint_works() -> None:
    found = []
    for strategy, reentrant in ((SMALL, False), ("all_reduce", True)):
        model = TwiceCheckpointed(reentrant)
        optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 12)).square().sum().backward()
            optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(*found)
    model = TwiceCheckpointed(True)
    flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), SMALL)
    with pytest.raises(ConfigurationError, match="use_reentrant=False, or use all_reduce"):
        model(torch.ones(2, 12)).square().sum().backward()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("strategy", [SMALL, "bucketed", "all_reduce"])
def test_a_penalty_of_the_gradients_counts_as_in_plain_torch(strategy: str) -> None:
    """Its backward pass needs the graph of the gradients, which a part that is handed over does not have."""
    found = []
    for one in (Watched(strategy), Watched("all_reduce")):
        plain = torch.optim.SGD(one.model.parameters(), lr=0.1)
        optimizer = one.optimizer if not found else plain
        optimizer.zero_grad()
        one.forward().backward(create_graph=True)
        sum((p.grad.square().sum() for p in one.model.parameters()), torch.zeros(())).backward()
        optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in one.model.parameters()]))
    assert torch.equal(*found)


def test_a_gradient_that_is_replaced_after_backward_is_refused(watched: Watched) -> None:
    watched.forward().backward()
    watched.model[4].weight.grad = None
    with pytest.raises(ConfigurationError, match=r"changed between backward\(\) and step\(\)"):
        watched.optimizer.step()


def test_accumulated_backwards_take_a_step_each() -> None:
    one = Watched(f"{SMALL[:-1]}, accumulate=2)")
    start = [p.detach().clone() for p in one.model.parameters()]
    one.forward().backward()
    one.optimizer.step()
    assert one.handed() == []
    assert all(torch.equal(a, b) for a, b in zip(start, one.model.parameters(), strict=True))
    one.optimizer.zero_grad()
    one.forward().backward()
    assert len(one.handed()) == 5
    one.optimizer.step()
    assert not torch.equal(start[0], one.model[0].weight)
