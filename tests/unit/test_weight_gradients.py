"""Gradients of weights that stages add together for several micro-batches: those of autograd, in little memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flockstep.arrays.schema import slices
from flockstep.partitions.pipeline import Pipeline
from flockstep.split.stages import MicroBatch, PipelineModel
from flockstep.split.torch_accumulation import AddedTogether, WeightGradient, fusible
from flockstep.split.torch_stages import TorchPart, split_torch
from support.split_jobs import chain, job_of

BATCH = np.arange(12)


class Twice(nn.Module):
    """A layer that is used twice, whose weight and a slope of whose output are used besides."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            once = self.layer(torch.ones_like(x[:1])).square().sum()
            (slope,) = torch.autograd.grad(once, self.layer.weight, create_graph=True)
        out: Tensor = self.layer(torch.tanh(self.layer(x))) + slope.sum() + self.layer.weight.sum()
        return out


class Words(nn.Module):
    """An embedding of the signs of numbers, with a normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(2, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.table((x > 0).long()).sum(1)) + x
        return out


def behind(*first: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The chain behind other layers."""

    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(*(layer() for layer in first), *chain()).double()

    return model


def computed(split: PipelineModel, count: int, reverse: bool = False) -> np.ndarray:
    """The gradient of all parts, from `count` micro-batches."""
    order = [
        MicroBatch(0, 0, number, BATCH[span], (span.stop - span.start) / len(BATCH))
        for number, span in enumerate(slices(len(BATCH), count))
    ]
    gradients = [np.zeros(part.schema.size) for part in split.parts]
    for batch in order:
        between = None
        for part in split.parts:
            between, _ = part.forward(0, part.initial(), batch, between)
    for batch in reversed(order) if reverse else order:
        errors = None
        for part, out in reversed(list(zip(split.parts, gradients, strict=True))):
            errors = part.backward(0, batch, errors, out)
    return np.concatenate(gradients)


@pytest.mark.parametrize("model", [chain, behind(Twice), behind(Words, Twice)])
@pytest.mark.parametrize(("count", "reverse"), [(1, False), (5, False), (12, True)])
def test_the_gradient_is_that_of_autograd(model: Callable[[], nn.Module], count: int, reverse: bool) -> None:
    split = split_torch(job_of(model), 0, Pipeline(2, microbatches=4))
    first = split.engine.initial()
    expected = np.zeros_like(first)
    split.engine.gradient(first, BATCH, expected)
    for _ in range(2):  # nothing is left of the step before
        np.testing.assert_allclose(computed(split, count, reverse), expected, rtol=0, atol=1e-12)
    for part in split.parts:
        assert isinstance(part, TorchPart)
        assert not any(one._slopes or one._inputs for sums in part._sums.values() for one in sums)


def test_factors_wait_until_they_take_the_memory_of_the_weight() -> None:
    """A weight of 10 × 10 waits for five rows of 10 + 10 elements; the sixth makes one product of all six."""
    layer, sums = nn.Linear(10, 10, bias=False), WeightGradient()
    total, rows = torch.zeros(10, 10), []
    for count in range(1, 7):
        x = torch.rand(1, 10)
        with AddedTogether(fusible(layer), [layer.weight], [sums]):
            y = layer(x)
        sums.tensor = total
        torch.autograd.backward(y, torch.ones(1, 10), inputs=[layer.weight])
        rows.append(x)
        expected = torch.ones(count, 10).t() @ torch.cat(rows) if count == 6 else torch.zeros(10, 10)
        torch.testing.assert_close(total, expected)
    assert "forward" not in vars(layer)


def test_layers_that_do_more_are_left_to_autograd() -> None:
    class Own(nn.Linear):
        pass

    changed = nn.Linear(2, 2)
    changed.forward = lambda x: x  # type: ignore[method-assign]
    plain, table = nn.Linear(2, 2), nn.Embedding(3, 2)
    others = [Own(2, 2), changed, nn.Embedding(3, 2, padding_idx=0), nn.Embedding(3, 2, max_norm=1.0), nn.LayerNorm(2)]
    assert fusible(nn.ModuleList([*others, plain, table])) == [plain, table]


def test_a_gradient_that_the_pass_does_not_compute_is_not_added() -> None:
    layers = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Embedding(4, 3)])
    weights = list(layers.parameters())
    sums = [WeightGradient(), WeightGradient()]
    for one, weight in zip(sums, weights, strict=True):
        one.tensor = weight.grad = torch.zeros_like(weight)
    x, words = torch.randn(2, 3, requires_grad=True), torch.tensor([1, 3])
    with AddedTogether(fusible(layers), weights, sums):
        y, z = layers[0](x), layers[1](words) * x
    torch.autograd.grad((y + z).sum(), x, retain_graph=True)
    assert not any(one._held or weight.grad.any() for one, weight in zip(sums, weights, strict=True))
    returned = torch.autograd.grad((y + z).sum(), weights, retain_graph=True)
    assert not any(one._held or weight.grad.any() for one, weight in zip(sums, weights, strict=True))
    torch.autograd.backward((y + z).sum(), inputs=weights)
    for one, weight, expected in zip(sums, weights, returned, strict=True):
        one.complete()
        assert expected.any()
        torch.testing.assert_close(weight.grad, expected)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # from torch itself
def test_layers_are_called_as_torch_calls_them() -> None:
    layer = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    expected = layer(x)
    with AddedTogether(fusible(layer), [layer.weight], [WeightGradient()]):
        torch.testing.assert_close(layer(input=x), expected)
        torch.testing.assert_close(torch.func.vmap(layer)(x), expected)
        _, slope = torch.func.jvp(layer, (x,), (x,))
    torch.testing.assert_close(slope, x @ layer.weight.t())


@pytest.mark.parametrize("step", [0, 1])
def test_a_step_begins_without_what_an_interrupted_step_has_left(step: int) -> None:
    """Whether the interrupted step or another one is next."""
    (part,) = split_torch(job_of(chain), 0, Pipeline(1, microbatches=4)).parts
    batches = [MicroBatch(0, step, number, BATCH[span], 0.25) for number, span in enumerate(slices(len(BATCH), 4))]
    gradients = []
    for interrupted in (False, True):
        out = np.zeros(part.schema.size)
        if interrupted:
            for batch in batches[:3]:
                before = MicroBatch(0, 0, batch.number, batch.indices, batch.share)
                part.forward(0, part.initial(), before, None)
                part.backward(0, before, None, np.zeros_like(out))
        for batch in batches:
            part.forward(0, part.initial(), batch, None)
            part.backward(0, batch, None, out)
        gradients.append(out)
    np.testing.assert_allclose(gradients[1], gradients[0], rtol=0, atol=1e-14)
