"""Gradients of torch modules: batched and one by one, the same every time, whoever is computed together."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from flockstep.errors import ConfigurationError  # noqa: E402
from flockstep.frameworks.base import Data  # noqa: E402
from flockstep.frameworks.torch import TorchEngine, accuracy  # noqa: E402
from flockstep.optimizers.adam import Adam, AdamW  # noqa: E402
from flockstep.optimizers.sgd import SGD  # noqa: E402
from support.torch_jobs import Attention, Frozen, classes, cnn, job, mlp  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


BATCHED = {"mlp": mlp, "cnn": cnn, "attention": Attention, "frozen": Frozen}


def replicas(engine: TorchEngine, count: int, batch: int = 8) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(2)
    params = engine.initial() + 0.1 * random.normal(size=(count, engine.schema.size)).astype("float32")
    return params, random.integers(engine.train_size, size=(count, batch)), np.full_like(params, np.nan)


def all_gradients(engine: TorchEngine, params: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    out = np.full_like(params, np.nan)
    losses = engine.gradients(params, indices, out, range(len(params)), [0] * len(params))
    return out, losses


@pytest.mark.parametrize("name", BATCHED)
def test_batched_equals_one_by_one_and_plain_torch(name: str) -> None:
    engine = TorchEngine(job(BATCHED[name]), seed=3)
    assert engine.batching == "batched"
    params, indices, alone = replicas(engine, 7)
    together, losses = all_gradients(engine, params, indices)
    for r in range(7):
        loss = engine.gradient(params[r], indices[r], alone[r], replica=r)
        assert loss == pytest.approx(losses[r], rel=1e-5)
        assert np.linalg.norm(together[r] - alone[r]) <= 1e-5 * np.linalg.norm(alone[r])
    module = copy.deepcopy(engine.module)
    for parameter, view in zip(engine.flat.parameters, engine.schema.views(params[6]).values(), strict=True):
        name_of = next(n for n, p in engine.module.named_parameters() if p is parameter)
        module.get_parameter(name_of).data.copy_(torch.from_numpy(view.copy()))
    data = engine._data
    module.zero_grad()
    engine.loss(module(data.train_x[indices[6]]), data.train_y[indices[6]]).backward()
    slopes = [p.grad for p in module.parameters() if p.requires_grad]
    expected = torch.cat(
        [
            torch.zeros(p.numel()) if g is None else g.reshape(-1)
            for g, p in zip(slopes, [p for p in module.parameters() if p.requires_grad], strict=True)
        ]
    )
    np.testing.assert_allclose(alone[6], expected.numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", BATCHED)
def test_bits_do_not_depend_on_who_is_computed_together(name: str) -> None:
    engine = TorchEngine(job(BATCHED[name]), seed=3)
    params, indices, _ = replicas(engine, 9)
    together, losses = all_gradients(engine, params, indices)
    again, same_losses = all_gradients(engine, params, indices)
    assert together.tobytes() == again.tobytes()
    assert losses.tolist() == same_losses.tolist()
    for chosen in ([4], [0, 8], [8, 3, 5]):
        some, few = all_gradients(engine, params[chosen], indices[chosen])
        assert some.tobytes() == together[chosen].tobytes()
        assert few.tolist() == losses[chosen].tolist()
    engine._chunk = 4
    chunked, _ = all_gradients(engine, params, indices)
    assert chunked.tobytes() == together.tobytes()


def test_a_frozen_parameter_is_not_touched_and_an_unused_one_has_gradient_zero() -> None:
    engine = TorchEngine(job(Frozen), seed=3)
    frozen = engine.module.first.weight.clone()
    params, indices, alone = replicas(engine, 3)
    together, _ = all_gradients(engine, params, indices)
    engine.gradient(params[0], indices[0], alone[0])
    names = [e.name for e in engine.schema.entries]
    assert names == ["unused.weight", "unused.bias", "last.weight", "last.bias"]
    for row in (together[1], alone[0]):
        views = engine.schema.views(row)
        assert not views["unused.weight"].any()
        assert views["last.weight"].all()
    assert torch.equal(engine.module.first.weight, frozen)


def test_the_tied_weight_gets_the_gradient_of_both_uses() -> None:
    engine = TorchEngine(job(Attention), seed=3)
    assert sum(e.name.endswith("weight") and e.shape == (11, 8) for e in engine.schema.entries) == 1
    params, indices, _ = replicas(engine, 2)
    together, _ = all_gradients(engine, params, indices)
    weight = engine.schema.views(together[0])["embed.weight"]
    indices[:] = indices[0, 0]
    seen = engine._data.train_x[indices[0, 0]].numpy()
    together, _ = all_gradients(engine, params, indices)
    by_output = np.setdiff1d(np.arange(11), seen)
    assert len(by_output) > 0
    assert engine.schema.views(together[0])["embed.weight"][by_output].any(axis=1).all()
    assert weight.any(axis=1).all()


def test_own_arrays_need_no_copy_and_give_the_same_bits() -> None:
    engine = TorchEngine(job(), seed=3)
    params, indices, out = replicas(engine, 1)
    loss = engine.gradient(params[0], indices[0], out[0])
    engine.params[:] = params[0]
    gradient = np.empty_like(out[0])
    assert engine.gradient(engine.params, indices[0], gradient) == loss
    assert gradient.tobytes() == out[0].tobytes()
    assert engine.module[0].weight.data_ptr() == engine.params.ctypes.data


def test_read_only_arrays_are_welcome() -> None:
    engine = TorchEngine(job(), seed=3)
    params, indices, out = replicas(engine, 2)
    params.flags.writeable = indices.flags.writeable = False
    engine.gradients(params, indices, out, [0, 1], [0, 0])
    engine.gradient(params[0], indices[0], out[1])
    np.testing.assert_allclose(out[0], out[1], rtol=1e-4, atol=1e-6)
    assert engine.evaluate(params[0]).loss == engine.evaluate(params[0].copy()).loss


def test_construction_follows_the_seed_and_leaves_torchs_random_numbers_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (TorchEngine(job(dropout), seed=s) for s in (1, 1, 2))
    first.gradient(first.initial(), np.arange(8), np.empty_like(first.params))
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(first.initial(), again.initial())
    assert not np.array_equal(first.initial(), other.initial())
    assert np.array_equal(first.params, first.initial())


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 12), nn.Dropout(0.5), nn.Linear(12, 4))


def test_dropout_goes_one_by_one_with_a_stream_per_gradient() -> None:
    engine = TorchEngine(job(dropout), seed=3)
    assert engine.batching == "one by one: Dropout '1' draws random numbers (p=0.5)"
    assert TorchEngine(job(lambda: nn.Sequential(mlp(), nn.Dropout(0.0))), seed=3).batching == "batched"
    params, indices, out = replicas(engine, 3)
    params[:], indices[:] = params[0], indices[0]
    engine.gradients(params, indices, out, [0, 1, 0], [0, 0, 1])
    assert len({row.tobytes() for row in out}) == 3
    torch.rand(10)
    alone = np.empty_like(out[0])
    engine.gradient(params[0], indices[0], alone, replica=1, step=0)
    assert alone.tobytes() == out[1].tobytes()
    other = TorchEngine(job(dropout), seed=4)
    other.gradient(params[0], indices[0], alone, replica=1, step=0)
    assert alone.tobytes() != out[1].tobytes()


def test_functional_randomness_is_noticed_too() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.rand_like(x))

    assert (
        TorchEngine(job(lambda: Noisy(16, 4)), 0).batching
        == "one by one: the model draws random numbers during training"
    )


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4))


def test_buffers_belong_to_their_replica() -> None:
    engine = TorchEngine(job(batch_norm), seed=3)
    assert engine.batching == "one by one: buffer '1.running_mean' changes during training"
    assert not engine.module[1].running_mean.any()
    params, indices, out = replicas(engine, 2)
    for step in range(3):
        engine.gradients(params, indices, out, [0, 1], [step, step])
    own = []
    for r in range(2):
        lone = TorchEngine(job(batch_norm), seed=3)
        for step in range(3):
            lone.gradient(params[r], indices[r], out[r], 0, step)
        own.append({name: buffer.clone() for name, buffer in lone.flat.buffers().items()})
        assert engine.evaluate(params[0], [r]) == lone.evaluate(params[0])
    mean = engine._mean_buffers([0, 1])
    torch.testing.assert_close(mean["1.running_mean"], (own[0]["1.running_mean"] + own[1]["1.running_mean"]) / 2)
    assert int(mean["1.num_batches_tracked"]) == 3
    assert engine.evaluate(params[0], [0]) != engine.evaluate(params[0], [1])
    fresh = TorchEngine(job(batch_norm), seed=3)
    assert engine.evaluate(params[0], [7]) == fresh.evaluate(params[0])


def test_a_model_that_cannot_be_batched_says_why() -> None:
    class Branches(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if self.weight.sum() > 0 else -x)

    engine = TorchEngine(job(lambda: Branches(16, 4)), seed=0)
    assert engine.batching.startswith("one by one: RuntimeError: ")
    assert "\n" not in engine.batching
    params, indices, alone = replicas(engine, 2)
    together, _ = all_gradients(engine, params, indices)
    engine.gradient(params[1], indices[1], alone[1])
    assert together[1].tobytes() == alone[1].tobytes()


def test_a_model_that_is_different_when_batched_is_found_out() -> None:
    class Sly(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2 if torch._C._functorch.is_batchedtensor(self.weight) else 1)

    batching = TorchEngine(job(lambda: Sly(16, 4)), seed=0).batching
    assert batching.startswith("one by one: the batched gradient differs from the gradient of one model by ")


def test_evaluation_is_in_evaluation_mode_over_the_whole_test_set(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TorchEngine(job(dropout), seed=3)
    params, _, _ = replicas(engine, 1)
    once = engine.evaluate(params[0])
    monkeypatch.setattr("flockstep.frameworks.torch_call.AT_ONCE", 7)
    pieces = engine.evaluate(params[0])
    assert once.loss == pytest.approx(pieces.loss, rel=1e-6)
    assert once.metric == pytest.approx(pieces.metric)
    assert engine.module.training
    assert np.array_equal(engine.params, engine.initial())
    module = copy.deepcopy(engine.module).eval()
    for view, parameter in zip(engine.schema.views(params[0]).values(), module.parameters(), strict=True):
        parameter.data.copy_(torch.from_numpy(view))
    data = classes()
    outputs = module(torch.from_numpy(data.test_x).float()).detach()
    assert once.loss == pytest.approx(float(F.cross_entropy(outputs, torch.from_numpy(data.test_y))), rel=1e-5)
    assert once.metric == pytest.approx(float((outputs.argmax(1).numpy() == data.test_y).mean()))


def test_metrics() -> None:
    outputs = torch.tensor([[1.0, 2], [3, 0], [0, 1], [1, 0]])
    assert accuracy(outputs, torch.tensor([1, 0, 0, 0])) == 0.75
    words = torch.zeros(2, 3, 5)
    words[:, :, 4] = 1
    assert accuracy(words, torch.tensor([[4, 4, 0], [4, 4, 4]])) == pytest.approx(5 / 6)
    assert accuracy(words.transpose(1, 2), torch.tensor([[4, 4, 0], [4, 4, 4]])) == pytest.approx(5 / 6)
    with pytest.raises(ConfigurationError, match=r"got \(4, 2\) for \(3,\)"):
        accuracy(outputs, torch.tensor([1, 0, 0]))
    engine = TorchEngine(job(metric=lambda o, t: float(o.shape[-1])), seed=0)
    assert engine.evaluate(engine.params).metric == 4
    assert 0 <= TorchEngine(job(Attention), seed=0).evaluate(TorchEngine(job(Attention), 0).params).metric <= 1


def test_labels_and_dtypes() -> None:
    engine = TorchEngine(job(), seed=0)
    assert engine.labels is not None
    assert engine.labels.tolist() == classes().train_y.tolist()
    assert TorchEngine(job(Attention), seed=0).labels is None
    assert engine._data.train_x.dtype == torch.float32
    assert TorchEngine(job(lambda: mlp().double()), seed=0)._data.train_x.dtype == torch.float64
    small = TorchEngine(
        job(
            data=lambda: Data(*(np.asarray(a, "uint8") for a in vars(classes()).values())),
            model=lambda: nn.Sequential(nn.Embedding(256, 2), nn.Flatten(), nn.Linear(32, 4)),
        ),
        seed=0,
    )
    assert small._data.train_y.dtype == torch.int64


def broken_loss(outputs: Any, targets: Any) -> Any:
    raise ValueError("no\nidea")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"loss": None}, "the job 'job' needs a loss for its torch model"),
        ({"model": dict}, r"needs a torch\.nn\.Module, got dict"),
        ({"model": lambda: nn.Linear(5, 4)}, "must work on its first batch, got RuntimeError: mat1 and mat2"),
        ({"loss": broken_loss}, "got ValueError: no; fix its model, loss or data"),
        (
            {"loss": lambda o, t: F.cross_entropy(o, t, reduction="none")},
            r"mean over a batch, got shape \(8,\); use .mean",
        ),
        ({"loss": lambda o, t: 1.0}, "must be a scalar tensor, the mean over a batch, got float"),
        ({"metric": "auc"}, "metric must be 'accuracy' or a function"),
        (
            {"data": lambda: Data(*[np.zeros((9, 16))] * 4), "loss": F.mse_loss},
            "accuracy needs integer targets, got ",
        ),
        (
            {"optimizer": lambda p: torch.optim.SGD(p[:2], lr=0.1)},
            "SGD must update every trainable parameter, but",
        ),
    ],
)
def test_a_job_that_does_not_fit_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        TorchEngine(job(**changes), seed=0)


def test_the_optimizer_of_a_job() -> None:
    assert TorchEngine(job(optimizer="adam"), 0).optimizer == Adam()
    assert TorchEngine(job(optimizer=AdamW(lr=1)), 0).optimizer == AdamW(lr=1)
    assert TorchEngine(job(optimizer=lambda p: torch.optim.SGD(p, lr=0.2)), 0).optimizer == SGD(lr=0.2)
