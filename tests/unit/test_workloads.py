"""The built-in jobs: the same data everywhere, the stated sizes, and gradients that lead downhill."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flockstep import registry
from flockstep.errors import ConfigurationError, MissingDependency
from flockstep.expression import from_data, to_data
from flockstep.frameworks.base import Data
from flockstep.frameworks.numpy import NumpyEngine
from flockstep.workloads import mnist1d
from flockstep.workloads.base import Workload
from flockstep.workloads.charlm import CharLM, encoded, windows
from flockstep.workloads.digits import Digits

NEEDS_TORCH = ("digits", "mnist1d", "charlm", "tabular")
HASHES = {
    "digits": "02db4d91189f7b5d013698e30e946e1f430b6d51aefc63c010a9a36634e1bcd2",
    "mnist1d": "f111e4e056007a259890876c0ad917372b6017a4e0840fb2398c367416b8bf69",
    "tabular": "9432c1ec0b01a506c08b9a1f7acac8558023e01802164390df2051e974cf50bb",
    "tabular(train=64, test=16, noise=0.5)": "b5c96305a73eaaf3d0214e741788108535209d3e47e1ce2fa178c67ea255217d",
    "quadratic": "84483b2c856d1021484772e38ce45c0139cba7e846a6674afc119e39e131a20e",
    "softmax": "8fe433c51eeef5fa5c2bf491a3804715676611faabadd06f9cdac4d8dece0751",
}
CORPUS = "".join(f"def f_{k}(x):\n    return x + {k * k}\n\n" for k in range(3000))


def load(text: str) -> Data:
    if text.partition("(")[0] in NEEDS_TORCH:
        pytest.importorskip("torch")
    if text.startswith("digits"):
        pytest.importorskip("sklearn")
    return Workload.parse(text).job(0).data()


def digest(data: Data) -> str:
    total = hashlib.sha256()
    for array in (data.train_x, data.train_y, data.test_x, data.test_y):
        total.update(np.ascontiguousarray(array))
    return total.hexdigest()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("corpus") / "text.py"
    file.write_text(CORPUS, encoding="ascii")
    return str(file)


@pytest.mark.parametrize("text", HASHES)
def test_the_data_has_the_published_hash(text: str) -> None:
    assert digest(load(text)) == HASHES[text]


@pytest.mark.parametrize("name", ["digits", "mnist1d", "tabular", "quadratic", "softmax"])
def test_data_follow_their_own_seed_and_not_the_run(name: str) -> None:
    load(name)
    workload = Workload.parse(name)
    assert digest(workload.job(1).data()) == digest(workload.job(2).data())
    assert digest(load(f"{name}(data_seed=9)")) != digest(load(name))


@pytest.mark.parametrize("name", NEEDS_TORCH)
def test_initial_weights_follow_the_run_and_leave_the_callers_random_numbers_alone(name: str) -> None:
    torch = pytest.importorskip("torch")

    def weights(seed: int) -> object:
        return torch.nn.utils.parameters_to_vector(Workload.parse(name).job(seed).model().parameters())

    before = torch.get_rng_state()
    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("name", "count"), [("digits", 38_170), ("mnist1d", 28_030), ("charlm", 108_864), ("tabular", 9_871)]
)
def test_parameter_counts_are_those_in_the_docstrings(name: str, count: int) -> None:
    pytest.importorskip("torch")
    workload = Workload.parse(name)
    assert sum(p.numel() for p in workload.job(0).model().parameters()) == count
    assert f"{count:,} parameters" in " ".join((type(workload).__doc__ or "").split())


@pytest.mark.parametrize("name", NEEDS_TORCH)
def test_some_steps_reduce_the_loss(name: str, corpus: str) -> None:
    torch = pytest.importorskip("torch")
    text = f"charlm(corpus={corpus!r})" if name == "charlm" else name
    load(text)
    job = Workload.parse(text).job(3)
    data, model = job.data(), job.model()
    x, y = torch.from_numpy(data.train_x[:64]), torch.from_numpy(data.train_y[:64])
    parameters = list(model.parameters())
    losses = []
    for _ in range(12):
        losses.append(job.loss(model(x), y))
        slopes = torch.autograd.grad(losses[-1], parameters)
        with torch.no_grad():
            for parameter, slope in zip(parameters, slopes, strict=True):
                parameter -= 0.05 * slope
    assert losses[-1].item() < 0.95 * losses[0].item()


@pytest.mark.parametrize("name", NEEDS_TORCH)
def test_gradients_of_many_replicas_can_be_computed_in_one_call(name: str, corpus: str) -> None:
    torch = pytest.importorskip("torch")
    text = f"charlm(corpus={corpus!r})" if name == "charlm" else name
    load(text)
    job = Workload.parse(text).job(3)
    data, model = job.data(), job.model()
    x = torch.from_numpy(data.train_x[:8]).unflatten(0, (2, 4))
    y = torch.from_numpy(data.train_y[:8]).unflatten(0, (2, 4))
    state = {key: value.detach() for key, value in model.named_parameters()}

    def loss(parameters: dict[str, object], x: object, y: object) -> object:
        return job.loss(torch.func.functional_call(model, parameters, (x,)), y)

    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(state, x, y)
    for replica in range(2):
        alone = torch.func.grad(loss)(state, x[replica], y[replica])
        for key, slope in alone.items():
            torch.testing.assert_close(together[key][replica], slope, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("name", "better"), [("softmax", 0.5), ("quadratic", 0.3)])
def test_numpy_jobs_train_without_torch(name: str, better: float) -> None:
    job = Workload.parse(name).job(0)
    engine = NumpyEngine(job, 0)
    params, gradient = engine.initial(), engine.initial()
    before = engine.evaluate(params)
    for step in range(40):
        engine.gradient(params, np.arange(step * 16, step * 16 + 16), gradient)
        params -= np.float32(engine.optimizer.lr) * gradient
    after = engine.evaluate(params)
    assert after.loss < better * before.loss
    assert (after.metric > before.metric) == job.higher_is_better
    assert (engine.labels is None) == (name == "quadratic")


def test_the_best_point_of_the_quadratic_has_loss_and_metric_zero() -> None:
    job = Workload.parse("quadratic(dimension=5, train=32)").job(0)
    engine = NumpyEngine(job, 0)
    best = job.data().test_x[0]
    assert engine.evaluate(best).loss == 0
    assert engine.evaluate(best).metric == 0
    assert engine.evaluate(best + np.float32(0.5)).metric == pytest.approx(0.25, rel=1e-5)


def test_the_labels_of_the_teacher_are_standardized_and_only_training_ones_have_noise() -> None:
    clean, noisy = load("tabular"), load("tabular(noise=0.5)")
    labels = np.concatenate([clean.train_y, clean.test_y])
    assert labels.mean() == pytest.approx(0, abs=1e-5)
    assert labels.std() == pytest.approx(1, rel=1e-5)
    assert np.array_equal(clean.test_y, noisy.test_y)
    assert (noisy.train_y - clean.train_y).std() == pytest.approx(0.5, rel=0.05)


def test_digits_are_the_ones_of_scikit_learn() -> None:
    data = load("digits")
    from sklearn.datasets import load_digits

    original = load_digits()
    assert (len(data.train_x), len(data.test_x)) == (1437, 360)
    pixels = np.concatenate([data.train_x, data.test_x]).reshape(-1, 64) * 16
    ours = np.column_stack([pixels, np.concatenate([data.train_y, data.test_y])])
    theirs = np.column_stack([original.data, original.target])
    assert sorted(map(tuple, ours.tolist())) == sorted(map(tuple, theirs.tolist()))
    assert (data.train_x.min(), data.train_x.max()) == (0, 1)


def test_signals_have_the_shape_and_scale_of_the_paper() -> None:
    x, y = mnist1d.signals(500, 3)
    assert x.shape == (500, 40)
    assert x.mean() == pytest.approx(0, abs=1e-5)
    assert x.std() == pytest.approx(1, rel=1e-4)
    assert np.bincount(y).tolist() == [50] * 10


def test_a_template_without_random_parts_is_only_stretched(monkeypatch: pytest.MonkeyPatch) -> None:
    for constant in ("SCALE", "SMOOTH_NOISE", "POINT_NOISE", "SHEAR"):
        monkeypatch.setattr(mnist1d, constant, 0.0)
    monkeypatch.setattr(mnist1d, "SHIFT", 1)
    monkeypatch.setattr(mnist1d, "PADDING", (60, 60))
    x, y = mnist1d.signals(40, 0)
    templates = np.array(mnist1d.TEMPLATES)
    scaled = (templates - templates[:, :1]) / templates.std(1, keepdims=True)
    for signal, digit in zip(x, y, strict=True):
        expected = np.interp(np.linspace(0, 71, 40), np.arange(72), np.pad(scaled[digit], (0, 60)))
        assert np.corrcoef(signal, expected)[0, 1] > 0.9999


def test_text_keeps_printable_characters_and_windows_predict_the_next_one() -> None:
    assert encoded("a\tb\r\n~é ".encode()).tolist() == [65, 66, 95, 94, 0]
    codes = np.arange(64 * 1000 + 1)
    data = windows(codes, 64)
    assert np.array_equal(data.train_y, data.train_x + 1)
    everything = np.concatenate([data.train_x, data.test_x]).ravel()
    assert np.array_equal(np.sort(everything), codes[:-1])
    assert len(data.test_x) == 256


def test_the_text_is_pinned_by_its_hash(corpus: str) -> None:
    pytest.importorskip("torch")
    facts = CharLM(corpus=corpus).job(0).facts
    assert facts == {"text_sha256": hashlib.sha256(bytes(encoded(CORPUS.encode()).tolist())).hexdigest()}
    assert CharLM(corpus=corpus, sha256=facts["text_sha256"]).job(0).facts == facts
    with pytest.raises(ConfigurationError, match=r"sha256 of the text must be 00, got .*set corpus"):
        CharLM(corpus=corpus, sha256="00").job(0)


def test_the_default_text_is_the_standard_library() -> None:
    pytest.importorskip("torch")
    first, second = CharLM().job(0), CharLM().job(1)
    assert first.facts == second.facts
    data = first.data()
    assert (len(data.train_x) + len(data.test_x)) * 64 == pytest.approx(2_000_000, abs=64)


def test_a_text_that_cannot_be_used(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with pytest.raises(ConfigurationError, match="corpus must be a readable file"):
        CharLM(corpus=str(tmp_path / "none.txt")).job(0)
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(ConfigurationError, match="printable characters, got 5; use a longer text"):
        CharLM(corpus=str(tmp_path / "short.txt")).job(0)


@pytest.mark.parametrize("name", NEEDS_TORCH)
def test_no_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependency, match=rf"workload {name} needs torch.*flockstep\[torch\]"):
        Workload.parse(name).job(0)


def test_no_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingDependency, match=r"workload digits needs scikit-learn.*flockstep\[workloads\]"):
        Digits().job(0)


def test_numpy_jobs_import_neither_torch_nor_scikit_learn() -> None:
    program = (
        "import sys; from flockstep.workloads.base import Workload\n"
        "for name in ('softmax', 'quadratic'): Workload.parse(name).job(0).data()\n"
        "for name in ('digits', 'mnist1d', 'charlm', 'tabular'): Workload.parse(name)\n"
        "print(*({'torch', 'sklearn', 'numba', 'plotly'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("name", registry.names("workload"))
def test_round_trips_and_targets(name: str) -> None:
    workload = Workload.parse(f"{name}(batch=7, optimizer=adam(lr=0.02))")
    assert Workload.parse(str(workload)) == workload
    assert from_data(to_data(workload), Workload) == workload
    assert str(Workload.parse(name)) == name
    if name not in NEEDS_TORCH:
        job = workload.job(0)
        assert (job.name, job.batch) == (name, 7)
        assert job.target is not None


@pytest.mark.parametrize(
    "text",
    [
        "digits(hidden=0)",
        "mnist1d(train=0)",
        "tabular(noise=-1)",
        "softmax(classes=1)",
        "quadratic(condition=0.5)",
        "charlm(limit=10)",
        "charlm(width=65)",
        "digits(data_seed=-1)",
    ],
)
def test_sizes_out_of_range(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"must be .*, got .*; "):
        Workload.parse(text)
