"""Samples that are read when they are needed, against the same samples in arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import flockstep
from flockstep.errors import CompositionError, ConfigurationError, FlockstepError
from flockstep.frameworks.base import Data, Engine, Job
from flockstep.frameworks.job import make_engine
from flockstep.frameworks.numpy import SoftmaxRegression
from flockstep.frameworks.streams import SampleReader
from flockstep.workloads.readers import ImageFolder, TextWindows, columns, hugging_face, parquet
from flockstep.workloads.sampler import Sampler
from flockstep.workloads.split import Split

X = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)
Y = np.random.default_rng(1).integers(3, size=40)


class Counted:
    """A data set that counts how often each sample is read, and by which threads."""

    def __init__(self, x: Any = X, y: Any = Y):
        self.x, self.y = x, y
        self.read = np.zeros(len(x), np.int64)
        self.threads: set[int] = set()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.read[index] += 1
        self.threads.add(threading.get_ident())
        return self.x[index], self.y[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(X, Y, strict=True)


SOURCES: dict[str, Callable[[], Any]] = {
    "data set": Counted,
    "list": lambda: list(zip(X, Y, strict=True)),
    "iterable": lambda: zip(X, Y, strict=True),
    "torch's data set": lambda: TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
    "loader": lambda: DataLoader(Counted(), batch_size=4, shuffle=True),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "arrays": lambda: (X, Y),
}


def job(data: Callable[[], Data], kind: str) -> Job:
    if kind == "numpy":
        return Job(lambda: SoftmaxRegression(5, 3), data, "sgd(lr=0.1)", batch=8)
    return Job(lambda: nn.Linear(5, 3), data, "sgd(lr=0.1)", nn.functional.cross_entropy, batch=8)


def computed(engine: Engine) -> list[Any]:
    """Gradients of single and several replicas, and an evaluation."""
    params, indices = engine.initial(), np.array([[3, 1, 3, 39], [0, 7, 12, 5]])
    one, many = np.empty_like(params), np.empty((2, len(params)), params.dtype)
    loss = engine.gradient(params, indices[0], one)
    losses = engine.gradients(np.stack([params, 2 * params]), indices, many, [0, 1], [0, 0])
    return [loss, *losses, one.tobytes(), many.tobytes(), engine.evaluate(params), engine.train_size, engine.classes]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("name", SOURCES)
def test_samples_that_are_read_when_needed_give_the_bits_of_arrays(kind: str, name: str) -> None:
    source = SOURCES[name]
    lazy = make_engine(job(lambda: Data.of(source(), source()), kind), 3)
    assert computed(lazy) == computed(make_engine(job(lambda: Data(X, Y, X, Y), kind), 3))


def test_the_next_batch_is_read_in_advance_and_every_sample_once() -> None:
    source = Counted()
    engine = make_engine(job(lambda: Data.of(source, (X, Y)), "numpy"), 0)
    source.read[:], sampler = 0, Sampler(np.arange(40), 8, 0, 0)
    source.threads.clear()
    params = engine.initial()
    for _ in range(5):
        indices, upcoming = sampler.next(), sampler.peek(8)
        engine.prefetch(indices)
        if upcoming is not None:
            engine.prefetch(upcoming)
        engine.gradient(params, indices, np.empty_like(params))
    assert upcoming is not None
    assert np.array_equal(engine._data.train_x[upcoming], X[upcoming])
    left = set(upcoming.tolist())
    assert source.read.tolist() == [1 + (i in left) for i in range(40)]
    assert len(source.threads) == 1
    assert threading.get_ident() not in source.threads


def test_a_peek_is_the_next_batch_and_draws_nothing() -> None:
    sampler, other = Sampler(np.arange(2048), 8, 5, 1), Sampler(np.arange(2048), 8, 5, 1)
    for _ in range(255):
        seen, drawn = sampler.peek(8), sampler.next()
        assert seen is not None
        assert np.array_equal(seen, drawn)
        assert np.array_equal(drawn, other.next())
    sampler.next()
    assert sampler.peek(8) is None  # the next one begins another permutation
    assert not np.array_equal(sampler.next(), other.next())


def test_classes_are_those_that_the_data_set_tells() -> None:
    told = Counted()
    told.targets = Y  # type: ignore[attr-defined]
    engine = make_engine(job(lambda: Data.of(told, (X, Y)), "torch"), 0)
    parts = Split.parse("by_label").assign(engine.labels, engine.train_size, 3, 0)
    want = Split.parse("by_label").assign(Y, 40, 3, 0)
    assert all(np.array_equal(a, b) for a, b in zip(parts, want, strict=True))
    untold = make_engine(job(lambda: Data.of(Counted(), (X, Y)), "torch"), 0)
    assert untold.classes
    with pytest.raises(CompositionError, match="by_label needs a class for every sample"):
        Split.parse("by_label").assign(untold.labels, untold.train_size, 3, 0)


class Noisy(Counted):
    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.x[index] + np.random.default_rng().normal(), self.y[index]


class Flipped(Counted):
    """A data set with a random flip, as image data sets have."""

    def __init__(self, seed: int):
        super().__init__()
        self.random = np.random.default_rng(seed)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.x[index][:: 1 if self.random.random() < 0.5 else -1], self.y[index]


def test_a_random_flip_is_noticed_and_missing_values_are_not_random() -> None:
    for seed in range(50):
        with pytest.raises(ConfigurationError, match=r"sample \d+ of train differs each time it is read"):
            Data.of(Flipped(seed), (X, Y))
    missing = X.copy()
    missing[0, 0] = np.nan
    assert len(Data.of(Counted(missing), (X, Y)).train_x) == 40


def test_what_cannot_be_counted_or_repeated_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flockstep.frameworks.streams.MOST", 100)
    weighted = WeightedRandomSampler([1.0] * 40, 40)
    cases: list[tuple[Any, str]] = [
        (Noisy(), r"sample 0 of train differs each time .*; draw random changes in the model's forward\(\)"),
        (Counted(X[:0], Y[:0]), "train must hold at least one sample, got none"),
        ([{"x": 1, "y": 2}], r"a sample of train must be a pair \(x, y\), got dict; return one, or name the columns"),
        (iter(lambda: (1, 2), None), "train is an iterable of more than 100 samples, which cannot be counted"),
        (
            DataLoader(Counted(), sampler=weighted),
            "the loader of train has a WeightedRandomSampler or makes its own batches",
        ),
        (17, "train must be a pair of arrays, a data set with __len__ and __getitem__, .* got int"),
    ]
    for samples, message in cases:
        with pytest.raises(ConfigurationError, match=message):
            Data.of(samples, (X, Y))
    uneven = SampleReader([(np.zeros(2), 0), (np.zeros(3), 1)], "train")
    with pytest.raises(ConfigurationError, match=r"samples of train must have one shape, got \(2,\) and \(3,\); let"):
        uneven.read(np.array([0, 1]))


JOB = """
import numpy as np
from torch import nn
from torch.utils.data import DataLoader
import flockstep

X = np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32)
Y = np.random.default_rng(1).integers(3, size=64)
PAIRS = list(zip(X, Y))

def job():
    data = lambda: {data}
    return flockstep.Job(lambda: nn.Linear(5, 3), data, "sgd(lr=0.1)", nn.functional.cross_entropy, batch=8, epochs=4)
"""


@pytest.mark.parametrize("run", [flockstep.simulate, pytest.param(flockstep.run, marks=pytest.mark.full)])
def test_a_run_on_a_loader_ends_as_a_run_on_arrays(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kinds = {"arrays": "flockstep.Data(X, Y, X, Y)", "loader": "flockstep.Data.of(DataLoader(PAIRS), PAIRS)"}
    results = {}
    for name, data in kinds.items():
        (tmp_path / f"{name}.py").write_text(JOB.format(data=data))
        results[name] = run(f"{name}.py", "all_reduce", workers=2, out=name)
    one, other = results.values()
    assert one.parameters()[0].tobytes() == other.parameters()[0].tobytes()
    assert one.summary.samples == other.summary.samples == 256
    assert one.summary.final_metric == other.summary.final_metric


def test_workers_that_read_an_iterable_in_another_order_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one = make_engine(job(lambda: Data.of(SOURCES["iterable"](), (X, Y)), "numpy"), 0)
    other = make_engine(job(lambda: Data.of(SOURCES["stream"](), (X, Y)), "numpy"), 0)
    assert one.facts == other.facts != {}
    shuffled = "(PAIRS[i] for i in np.random.default_rng().permutation(64))"
    (tmp_path / "shuffled.py").write_text(JOB.format(data=f"flockstep.Data.of({shuffled}, PAIRS)"))
    with pytest.raises(
        FlockstepError, match=r"the data has changed: train is .* read the data in the same order in every process"
    ):
        flockstep.run("shuffled.py", "all_reduce", workers=2, out="run")


def test_windows_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"abcdefghij")
    windows = TextWindows(tmp_path / "text", 3)
    assert [(bytes(x.tolist()), bytes(y.tolist())) for x, y in (windows[i] for i in range(len(windows)))] == [
        (b"abc", b"bcd"), (b"def", b"efg"), (b"ghi", b"hij"),
    ]  # fmt: skip
    with pytest.raises(ConfigurationError, match="got windows of 10 bytes and a file of 10 bytes"):
        TextWindows(tmp_path / "text", 10)
    with pytest.raises(ConfigurationError, match="there is no text in"):
        TextWindows(tmp_path / "other", 3)


@pytest.mark.skipif(find_spec("PIL") is None, reason="needs Pillow")
def test_a_folder_of_images(tmp_path: Path) -> None:
    from PIL import Image

    for number, name in enumerate(["cat", "dog", "cat"]):
        (tmp_path / name).mkdir(exist_ok=True)
        Image.new("RGB", (4, 2), (number, 51, 255)).save(tmp_path / name / f"{number}.png")
    images = ImageFolder(tmp_path)
    assert (images.classes, images.targets, len(images)) == (["cat", "dog"], [0, 0, 1], 3)
    x, y = images[1]
    assert (x.shape, x.dtype, y) == ((3, 2, 4), np.float32, 0)
    assert x[:, 0, 0].tolist() == (np.array([2, 51, 255], np.float32) / np.float32(255)).tolist()
    data = Data.of(ImageFolder(tmp_path, (8, 6)), images)
    assert data.train_x[np.array([2, 0])].shape == (2, 3, 8, 6)
    assert data.train_y.numpy().tolist() == [0, 0, 1]
    with pytest.raises(ConfigurationError, match=r"holds no images, got none of \.png"):
        ImageFolder(tmp_path / "cat")


@pytest.mark.skipif(find_spec("PIL") is None, reason="needs Pillow")
@pytest.mark.parametrize("dtype", ["uint16", "int32", "float32"])
def test_images_whose_values_would_be_cut_off_are_refused(dtype: str, tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "cat").mkdir()
    Image.fromarray(np.array([[0, 300], [40000, 65535]], dtype)).save(tmp_path / "cat" / "0.tif")
    with pytest.raises(ConfigurationError, match=r"0\.tif must have 8 bits per color, got an image of mode [IF]"):
        ImageFolder(tmp_path)[0]


@pytest.mark.skipif(find_spec("datasets") is None, reason="needs datasets")
@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_a_data_set_of_hugging_face_on_disk(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"pixels": X.tolist(), "label": Y.tolist(), "text": ["a"] * 40})
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path))
    samples = hugging_face(tmp_path / "train", "pixels", "label")
    engine = make_engine(job(lambda: Data.of(samples, samples), "torch"), 3)
    assert computed(engine) == computed(make_engine(job(lambda: Data(X, Y, X, Y), "torch"), 3))
    assert np.array_equal(engine.labels, Y)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="the rows have no column 'image', got label, pixels, text"):
        hugging_face(tmp_path / "train", "image", "label")
    with pytest.raises(ConfigurationError, match="holds several data sets, got train; name the folder of one"):
        hugging_face(tmp_path, "pixels", "label")


@pytest.mark.skipif(find_spec("pyarrow") is None, reason="needs pyarrow")
def test_columns_of_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = {"pixels": X.tolist(), "a": X[:, 0], "b": X[:, 1], "label": Y, "uneven": [[1.0] * (1 + i % 2) for i in Y]}
    table |= {"holes": [[1.0, None], *[[3.0, 4.0]] * 39], "names": ["cat"] * 40, "nested": [[[1.0]]] * 40}
    pq.write_table(pa.table({**table, "some": [None, *range(39)]}), tmp_path / "data.parquet", row_group_size=7)
    x, y = parquet(tmp_path / "data.parquet", "pixels", "label")
    assert np.array_equal(x.astype(np.float32), X)
    assert np.array_equal(y, Y)
    assert np.array_equal(parquet(tmp_path / "data.parquet", ["a", "b"], "label")[0], X[:, :2])
    for column, message in {
        "uneven": "the lists of column 'uneven' of .* must have one length, got 1 to 2",
        "some": "column 'some' of .* must have a value in every row, got 1 missing",
        "holes": "the lists of column 'holes' of .* must have no missing values, got 1; fill them",
        "names": "column 'names' of .* must hold numbers or lists of numbers, got string; store numbers",
        "nested": "column 'nested' of .* must hold numbers or lists of numbers, got list",
        "none": "has no column 'none', got pixels, a, b",
    }.items():
        with pytest.raises(ConfigurationError, match=message):
            parquet(tmp_path / "data.parquet", column, "label")


def test_columns_of_rows() -> None:
    rows = [{"x": 1.0, "y": 2, "z": 3}]
    assert columns(rows, "x", "y")[0] == (1.0, 2)
    with pytest.raises(ConfigurationError, match="the rows have no column 'w', got x, y, z; name one of these"):
        columns(rows, "w", "y")
