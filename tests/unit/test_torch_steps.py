"""The optimizer that `flockstep.distribute` returns is a torch optimizer: one worker is plain PyTorch."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import flockstep  # noqa: E402
from flockstep.errors import CompositionError, ConfigurationError, Diverged  # noqa: E402
from flockstep.frameworks.torch_groups import ELEMENTWISE  # noqa: E402
from flockstep.runtime.epochs import EpochCount, ShardedBatches  # noqa: E402

SELVES, SERVERS = ["all_reduce", "local_sgd"], ["bsp", "asgd", "ps(consistency=ssp(3), shards=2)"]


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def grouped(model: nn.Sequential, kind: str) -> torch.optim.Optimizer:
    """Three groups whose elements lie between each other, with settings of their own."""
    groups = [
        {"params": [model[0].weight, model[2].weight]},
        {"params": [model[0].bias], "lr": 0.01, "weight_decay": 0.1},
        {"params": [model[2].bias], "lr": 0.0},
    ]
    return (
        getattr(torch.optim, kind)(groups, lr=0.02, weight_decay=0.01 if kind != "Rprop" else 0)
        if (kind != "Rprop")
        else torch.optim.Rprop([{k: v for k, v in group.items() if k != "weight_decay"} for group in groups], lr=0.02)
    )


def train(
    strategy: str | None,
    make: Callable[[nn.Sequential], torch.optim.Optimizer],
    schedule: Callable[[Any], Any] | None = None,
    clip: float = 0.0,
) -> list[torch.Tensor]:
    model = network()
    plain = make(model)
    optimizer: Any = plain if strategy is None else flockstep.distribute(model, plain, strategy)
    turns = schedule(optimizer) if schedule else None
    generator = torch.Generator().manual_seed(5)
    for _ in range(12):
        x = torch.randn(8, 4, generator=generator)
        optimizer.zero_grad()
        (model(x) - x[:, :2]).square().mean().backward()
        if clip and strategy is None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        elif clip:
            flockstep.clip_grad_norm_(optimizer, clip)
        optimizer.step()
        if turns is not None:
            turns.step()
    if strategy is not None:
        optimizer.finish()
    return [p.detach().clone() for p in model.parameters()]


def test_a_recorded_loss_that_is_not_finite_ends_the_run_at_its_step() -> None:
    model = network()
    optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "all_reduce")
    for loss in (1.0, torch.tensor(2.0)):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.record_loss(loss)
        optimizer.step()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.record_loss(torch.tensor(float("nan")))
    with pytest.raises(Diverged, match="the loss of worker 0 is nan at step 2; lower the learning rate"):
        optimizer.step()


def test_a_metric_without_a_name_a_direction_or_a_weight_is_refused() -> None:
    model = network()
    optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "all_reduce")
    optimizer.record_metric("accuracy", torch.tensor(0.5), higher_is_better=True)
    with pytest.raises(ConfigurationError, match="must be the same for all values of accuracy, got True before and"):
        optimizer.record_metric("accuracy", 0.5, higher_is_better=False)
    with pytest.raises(ConfigurationError, match=r"the name of a metric must be a text, got ' '"):
        optimizer.record_metric(" ", 0.5, higher_is_better=True)
    with pytest.raises(ConfigurationError, match="count must be a number >= 0, got -1"):
        optimizer.record_metric("accuracy", 0.5, higher_is_better=True, count=-1)


@pytest.mark.oracle("optimizer:torch")
@pytest.mark.parametrize("strategy", [*SELVES[:1], *SERVERS[1:], "scatter_reduce", "tree_server", "hogwild"])
@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_every_elementwise_optimizer_with_its_groups_is_plain_torch(kind: str, strategy: str) -> None:
    ours, plain = train(strategy, lambda m: grouped(m, kind)), train(None, lambda m: grouped(m, kind))
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.negative_control("optimizer:torch")
def test_one_learning_rate_for_all_groups_is_noticed() -> None:
    ours = train("asgd", lambda m: torch.optim.RMSprop(m.parameters(), lr=0.02))
    plain = train(None, lambda m: grouped(m, "RMSprop"))
    assert not all(torch.allclose(a, b, atol=1e-4) for a, b in zip(ours, plain, strict=True))


def per_group(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda t: 0.9**t, lambda t: 1 + t, lambda t: 0.5])


def one_cycle(optimizer: Any) -> Any:
    """A scheduler that changes betas or momentum too."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)


SCHEDULES = [
    (lambda m: grouped(m, "AdamW"), per_group),
    (lambda m: grouped(m, "SGD"), per_group),
    (lambda m: torch.optim.Adam(m.parameters(), lr=0.1), one_cycle),
    (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), one_cycle),
]


@pytest.mark.parametrize("strategy", ["all_reduce", "asgd", "tree_server"])
@pytest.mark.parametrize("which", range(len(SCHEDULES)))
def test_schedules_of_every_group_reach_who_steps(which: int, strategy: str) -> None:
    make, schedule = SCHEDULES[which]
    for a, b in zip(train(strategy, make, schedule), train(None, make, schedule), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.oracle("optimizer:clipped")
@pytest.mark.parametrize(
    "strategy", [*SELVES, "bucketed(cap=0.00008, first=0.00004)", "bsp", "asgd", "tree_server", "scatter_reduce"]
)
def test_clipping_is_torchs(strategy: str) -> None:
    def make(model: nn.Sequential) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)

    plain = train(None, make, clip=0.05)
    assert not torch.allclose(plain[0], train(None, make)[0], atol=1e-3), "it acts at all"
    for a, b in zip(train(strategy, make, clip=0.05), plain, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.negative_control("optimizer:clipped")
def test_a_server_that_does_not_clip_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from flockstep.optimizers.clipped import Clipped

    monkeypatch.setattr(Clipped, "step", lambda self, *arguments: self.optimizer.step(*arguments))
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        test_clipping_is_torchs("bsp")


def test_clipping_where_no_node_knows_the_norm_is_refused() -> None:
    model = network()
    optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "ps(bsp, shards=2)")
    with pytest.raises(CompositionError, match="no node knows the norm of the whole gradient; use a strategy"):
        flockstep.clip_grad_norm_(optimizer, 1.0)


@pytest.mark.parametrize(("kind", "what"), [("Adafactor", "Adafactor"), ("SGD", "Own")])
def test_what_servers_cannot_step_is_refused_with_the_strategies_that_can(kind: str, what: str) -> None:
    model = network()
    optimizer = type("Own", (torch.optim.SGD,), {}) if what == "Own" else getattr(torch.optim, kind)
    with pytest.raises(ConfigurationError, match=f"{what} allows this; .* such as all_reduce, bucketed or"):
        flockstep.distribute(model, optimizer(model.parameters(), lr=0.1), "asgd")


@pytest.mark.parametrize("strategy", ["all_reduce", "bsp", "bucketed(cap=0.00008, first=0.00004)"])
def test_a_closure_is_called_once_and_its_loss_returned(strategy: str) -> None:
    model, other = network(), network()
    optimizer: Any = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    calls = []

    def closure(one: nn.Module, its: Any) -> torch.Tensor:
        calls.append(one)
        its.zero_grad()
        loss: torch.Tensor = one(torch.ones(3, 4)).square().mean()
        loss.backward()
        return loss

    with torch.no_grad():
        for _ in range(3):
            assert optimizer.step(lambda: closure(model, optimizer)) == plain.step(lambda: closure(other, plain))
    assert calls.count(model) == 3
    optimizer.finish()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_an_optimizer_that_evaluates_its_closure_several_times_steps_as_alone(search: str | None) -> None:
    model, other = network(), network()
    plain, own = (torch.optim.LBFGS(one.parameters(), max_iter=6, line_search_fn=search) for one in (other, model))
    optimizer: Any = flockstep.distribute(model, own, "all_reduce")

    def closure(one: nn.Module, its: Any) -> torch.Tensor:
        its.zero_grad()
        loss: torch.Tensor = (one(torch.arange(12.0).reshape(3, 4)) - 1).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        assert optimizer.step(lambda: closure(model, optimizer)) == plain.step(lambda: closure(other, plain))
    assert own.state[next(model.parameters())]["func_evals"] > 6
    assert optimizer.loop.steps == own.state[next(model.parameters())]["func_evals"]
    optimizer.finish()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_closures_that_cannot_be_evaluated_on_all_ranks_are_refused() -> None:
    model = network()
    for strategy in ("local_sgd", "asgd", "ps", "powersgd", "majority_vote", "all_reduce(codec=topk(0.1))"):
        with pytest.raises(
            CompositionError, match=r"LBFGS evaluates its closure several times per step .*; use all_re"
        ):
            flockstep.distribute(model, torch.optim.LBFGS(model.parameters()), strategy)
    mixed = nn.ParameterList([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))])
    with pytest.raises(
        ConfigurationError, match="LBFGS compares losses at several points, and rounding parameters to a narrower"
    ):
        flockstep.distribute(mixed, torch.optim.LBFGS(mixed.parameters()), "all_reduce")
    optimizer: Any = flockstep.distribute(model, torch.optim.LBFGS(model.parameters()), "all_reduce")
    with pytest.raises(ConfigurationError, match=r"LBFGS needs a closure .*, got step\(\) without one; pass it as"):
        optimizer.step()
    with pytest.raises(ConfigurationError, match=r"the closure must return the loss, one number, got NoneType"):
        optimizer.step(lambda: None)
    with optimizer.join(), pytest.raises(CompositionError, match="LBFGS evaluates its closure on all ranks together"):
        optimizer.step(lambda: torch.zeros(()))
    optimizer.finish()


class Ascending(torch.optim.Optimizer):
    """SAM: steps along the gradient at a point uphill; assigns to `.data`, as the common class does."""

    def step(self, closure: Any) -> torch.Tensor:  # type: ignore[override]
        with torch.enable_grad():
            loss: torch.Tensor = closure()
        before = [[p.data.clone() for p in group["params"]] for group in self.param_groups]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(p.grad, alpha=0.05)
        with torch.enable_grad():
            closure()
        for group, old in zip(self.param_groups, before, strict=True):
            for p, value in zip(group["params"], old, strict=True):
                p.data = value.sub_(p.grad, alpha=group["lr"])
        return loss


def test_an_optimizer_that_declares_its_closure_steps_as_alone() -> None:
    model, other = network(), network()
    plain = Ascending(other.parameters(), {"lr": 0.1})
    optimizer: Any = flockstep.distribute(model, Ascending(model.parameters(), {"lr": 0.1}), "all_reduce")

    def closure(one: nn.Module, its: Any) -> torch.Tensor:
        its.zero_grad()
        loss: torch.Tensor = (one(torch.arange(12.0).reshape(3, 4)) - 1).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        assert optimizer.step(lambda: closure(model, optimizer)) == plain.step(lambda: closure(other, plain))
    optimizer.finish()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


class Fixed(torch.optim.Optimizer):
    """Steps of a fixed size; no group has a learning rate."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad.sign(), alpha=group["size"])


def test_servers_refuse_an_optimizer_without_a_learning_rate() -> None:
    model = network()
    with pytest.raises(ConfigurationError, match="flockstep does not know whether Fixed allows this"):
        flockstep.distribute(model, Fixed(model.parameters(), {"size": 0.01}), "asgd")


@pytest.mark.parametrize("action", ["skip", "quarantine"])
def test_a_search_takes_no_zeros_in_place_of_a_gradient(action: Any) -> None:
    model = network()
    with pytest.raises(
        CompositionError, match=rf"LBFGS compares losses .* got on_bad_gradient={action}; use on_bad_gr"
    ):
        flockstep.distribute(model, torch.optim.LBFGS(model.parameters()), "all_reduce", on_bad_gradient=action)


def test_sparse_adam_is_refused() -> None:
    model = network()
    with pytest.raises(ConfigurationError, match=r"needs sparse gradients.* or torch.optim.Adagrad, which"):
        flockstep.distribute(model, torch.optim.SparseAdam(model.parameters()), "all_reduce")


@pytest.mark.parametrize("strategy", [*SELVES, *SERVERS])
def test_hooks_are_called_before_and_after_every_step(strategy: str) -> None:
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    heard = []
    plain.register_step_pre_hook(lambda *_: heard.append("early"))
    optimizer: Any = flockstep.distribute(model, plain, strategy)
    optimizer.register_step_pre_hook(lambda *_: heard.append("before"))
    optimizer.register_step_post_hook(lambda *_: heard.append("after"))
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    assert heard == ["early", "before", "after"] * 2


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy, pickle.dumps])
def test_it_cannot_be_copied(how: Callable[[Any], Any]) -> None:
    model = network()
    optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "all_reduce")
    with pytest.raises(ConfigurationError, match="cannot be copied"):
        how(optimizer)


@pytest.mark.parametrize("none", [False, True])
@pytest.mark.parametrize("strategy", SELVES)
def test_parameters_without_a_gradient_are_those_of_plain_torch(strategy: str, none: bool) -> None:
    """Every other step leaves the first layer without one: momentum moves it where its gradient is zero, not none."""

    def run(strategy: str | None) -> list[torch.Tensor]:
        model = network()
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        optimizer: Any = plain if strategy is None else flockstep.distribute(model, plain, strategy)
        for step in range(6):
            optimizer.zero_grad(set_to_none=none)
            whole = model if step % 2 == 0 else model[2]
            whole(torch.ones(3, 8 if step % 2 else 4)).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    assert all(map(torch.equal, run(strategy), run(None)))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_add_up_over_backward_passes_and_are_gone_after_zero_grad() -> None:
    """As torch has it, zero_grad leaves none; a second pass adds to the first, and a graph of gradients stays whole."""
    model = network()
    optimizer: Any = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "all_reduce")
    x = torch.ones(3, 4)
    for _ in range(2):
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        model(x).square().mean().backward()
        once = [p.grad.clone() for p in model.parameters()]
        model(x).square().mean().backward()
        assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), once, strict=True))
        optimizer.step()
    optimizer.zero_grad()
    model(x).square().mean().backward(create_graph=True)
    norm = sum((p.grad.square().sum() for p in model.parameters()), torch.zeros(()))
    assert norm.requires_grad
    optimizer.finish()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    assert not any(map(optimizer.flat.in_place, range(4)))  # the script's own again


def test_a_step_inside_no_sync_is_refused() -> None:
    model = network()
    optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "all_reduce")
    with (
        optimizer.no_sync(),
        pytest.raises(ConfigurationError, match="would use gradients that other workers have not received"),
    ):
        optimizer.step()


def test_a_scaler_and_parts_that_left_before_it_could_unscale() -> None:
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = flockstep.distribute(model, inner, "bucketed(cap=0.00008, first=0.00004)")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(3, 4)).square().mean()).backward()
    with pytest.raises(ConfigurationError, match="had sent part of the gradients before GradScaler could unscale"):
        scaler.step(optimizer)


def test_settings_may_change_and_what_is_remembered_may_not() -> None:
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = flockstep.distribute(model, inner, "asgd")
    inner.param_groups[0]["momentum"] = 0.9
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(
        ConfigurationError, match="settings of the optimizer may change during training only if its state"
    ):
        optimizer.step()


@pytest.mark.parametrize("strategy", ["bucketed(cap=0.00008, first=0.00004)", "all_reduce", "asgd"])
def test_micro_batches_in_no_sync_are_those_of_plain_torch(strategy: str) -> None:
    model, other = network(), network()
    optimizer: Any = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    for step in range(2):
        for turn in range(3):
            x = torch.full((2, 4), float(step + turn))
            with contextlib.nullcontext() if turn == 2 else optimizer.no_sync():
                (model(x).square().mean() / 3).backward()
            (other(x).square().mean() / 3).backward()
        for one in (optimizer, plain):
            one.step()
            one.zero_grad(set_to_none=True)
    optimizer.finish()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("strategy", [*SELVES, *SERVERS])
def test_a_schedule_made_before_distribute_sees_the_steps(strategy: str) -> None:
    """torch warned that the schedule stepped before the optimizer, where a server steps in its place."""
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(plain, 1)
    optimizer: Any = flockstep.distribute(model, plain, strategy)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.parametrize("inputs", [49, 50])
def test_bucketed_needs_no_sync_once_a_model_exceeds_the_first_bucket(inputs: int) -> None:
    """Of 50 elements: one bucket leaves in step(), two leave in backward."""
    model = nn.Linear(inputs, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = flockstep.distribute(model, inner, "bucketed(cap=0.0002, first=0.0002)")
    model(torch.ones(1, inputs)).sum().backward()
    if inputs == 50:
        with pytest.raises(ConfigurationError, match="a second gradient before step"):
            model(torch.ones(1, inputs)).sum().backward()
        return
    before = model.weight.detach().clone()
    model(torch.ones(1, inputs)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before - 0.2)


def test_swapped_arguments_of_distribute_are_refused_with_their_order() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = "the model of flockstep.distribute must be a torch.nn.Module, got SGD; write .*model, optimizer, .* order"
    with pytest.raises(ConfigurationError, match=said):
        flockstep.distribute(optimizer, model, "all_reduce")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"the optimizer .* must be a torch.optim.Optimizer, got generator"):
        flockstep.distribute(model, model.parameters(), "all_reduce")  # type: ignore[arg-type]


class Odd(nn.Module):
    """A sparse gradient, a parameter that only some steps use, and one in another order of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4, sparse=True)
        self.filters = nn.Conv2d(1, 2, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.sometimes = nn.Linear(4, 4)

    def forward(self, number: int) -> torch.Tensor:
        x = self.words(torch.tensor([number % 5, 1]))
        x = self.sometimes(x) if number % 3 else x
        return x.square().mean() + self.filters(x.repeat(2, 2).reshape(1, 1, 4, 8)).square().mean()


@pytest.mark.parametrize("strategy", ["all_reduce", "bucketed", "local_sgd(2)"])
def test_gradients_of_every_kind_step_as_in_plain_torch_once_they_are_gathered_in_one_call(strategy: str) -> None:
    """Which is so after the first ten steps; a worker alone under `all_reduce` never gathers those that are dense."""
    torch.manual_seed(0)
    model = Odd()
    plain = copy.deepcopy(model)
    optimizer: Any = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(14):
        for one, stepper in ((model, optimizer), (plain, theirs)):
            stepper.zero_grad()
            one(number).backward()
            one(number + 1).backward()
            stepper.step()
    optimizer.finish()
    for ours, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-6)  # a dense sum of a sparse gradient rounds otherwise


def test_a_worker_alone_takes_no_step_along_a_gradient_whose_loss_is_refused() -> None:
    model = nn.Linear(2, 1, bias=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer: Any = flockstep.distribute(model, sgd, "all_reduce", on_bad_gradient="skip")
    before = model.weight.detach().clone()
    for loss, moves in ((math.nan, False), (1.0, True)):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.record_loss(loss)
        optimizer.step()
        assert torch.equal(model.weight, before) is not moves


def test_a_gradient_whose_elements_share_memory_steps_as_in_plain_torch() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer: Any = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.5), "all_reduce")
    before = model.weight.detach().clone()
    model.weight.grad = torch.ones(()).expand(1, 2)
    optimizer.step()
    assert torch.equal(model.weight, before - 0.5)


def test_two_loading_processes_serve_a_worker_whom_others_may_join() -> None:
    """Its first batches are compared with those that other workers would get, of whom there is none yet."""

    class Batches(list[int]):
        num_workers = 2

    assert list(ShardedBatches(Batches([3, 4, 5]), 0, 1, EpochCount())) == [3, 4, 5]
