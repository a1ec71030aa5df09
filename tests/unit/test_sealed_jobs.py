"""Sealed jobs: the programs compute the bits of the job, and nothing of the source travels."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import flockstep
import support.compiler  # noqa: F401
from flockstep import Data, Job
from flockstep.errors import ConfigurationError
from flockstep.frameworks.job import make_engine
from flockstep.options import SealedOptions, SealOptions
from flockstep.sealed import archive
from flockstep.sealed.contract import Contract, facts_of
from flockstep.sealed.job import job_of, load_sealed, sealed
from flockstep.sealed.manifest import MANIFEST, SECTIONS, OperatorProgram, SealedManifest
from flockstep.sealed.program import built
from support import sealed_jobs
from support.sealed_data import LENGTH, image_data, text_data, words_of, write_data
from support.sealed_jobs import JOBS

ANYONE = SealedOptions(trust="anyone")


def sections_of(job: Job, **options: Any) -> dict[str, bytes]:
    return sealed(job, SealOptions(job="", **options))[0]


def manifest_of(job: Job, **options: Any) -> SealedManifest:
    return msgspec.json.decode(sections_of(job, **options)[MANIFEST], type=SealedManifest)


@pytest.mark.parametrize("rename", [False, True])
@pytest.mark.parametrize("name", JOBS)
def test_a_sealed_job_is_simulated_to_the_bits_of_the_job(name: str, rename: bool, tmp_path: Path) -> None:
    job, data = JOBS[name](), write_data(tmp_path / "data", JOBS[name]().data())
    file = flockstep.seal(job, out=tmp_path / "model.sealed", seed=3, rename=rename)
    again = load_sealed(file, SealedOptions(trust="anyone", data=str(data)))
    engines = [make_engine(one, 3) for one in (job, again)]
    params = engines[0].initial()
    assert np.array_equal(params, engines[1].initial())
    for step in range(4):
        outs = [np.empty_like(params) for _ in engines]
        indices = np.arange(1 + 5 * step) * 3
        if name == "normed" and len(indices) == 1:  # batch norm takes two values
            continue
        losses = [one.gradient(params, indices, out, 1, step) for one, out in zip(engines, outs, strict=True)]
        assert losses[0] == losses[1]
        assert np.array_equal(*outs)
        params = params - np.float32(0.1) * outs[0]
    assert engines[0].evaluate(params, [1]) == engines[1].evaluate(params, [1])
    assert len({one.batching.partition(":")[0] for one in engines}) == 1
    engines[1]._kernels = engines[0]._kernels  # torch warns once in a process, by which the first chooses its kernels
    many, samples = np.stack([params, params * np.float32(0.9)]), np.arange(16).reshape(2, 8)
    outs = [np.empty_like(many) for _ in engines]
    for one, out in zip(engines, outs, strict=True):
        one.gradients(many, samples, out, [0, 1], [5, 5])
    assert np.array_equal(*outs)
    for field in ("batch", "epochs", "higher_is_better", "target", "least_steps", "schedule"):
        assert getattr(job, field) == getattr(again, field)
    assert str(engines[1].optimizer) == str(engines[0].optimizer)


def test_nothing_of_the_source_travels(tmp_path: Path) -> None:
    source = Path(sealed_jobs.__file__).read_text("utf-8")
    public = words_of(Path(archive.__file__).with_name("manifest.py").read_text("utf-8"))
    operators = {word for name in dir(torch.ops.aten) for word in (name, *name.split("_"))}
    known = (
        public
        | operators
        | set(dir(torch))
        | {"batch", "keys", "momentum", "view", "cosine", "targets", "target", "adam", "shape"}
    )
    hidden = {word for word in words_of(source) if word not in known}
    lines = [line.strip() for line in source.splitlines() if len(line.strip()) > 12]
    assert {"HiddenBlock", "secret_queries", "residual_stream", "nats_per_token", "HEADS"} <= hidden
    for name, job in JOBS.items():
        data = flockstep.seal(job(), out=tmp_path / f"{name}.sealed", rename=True).read_bytes()
        found = {word for word in hidden if re.search(rb"(?<![\w])" + word.encode() + rb"(?![\w])", data)}
        assert found == set()
        assert [line for line in lines if line.encode() in data] == []
        assert str(Path(sealed_jobs.__file__).parent).encode() not in data
        assert b"sealed_jobs" not in data


def test_names_stay_unless_they_are_replaced_and_the_sender_keeps_what_was_replaced(tmp_path: Path) -> None:
    plain = manifest_of(JOBS["gpt"]())
    assert plain.tensors[0].name == "secret_places"
    file = flockstep.seal(JOBS["gpt"](), out=tmp_path / "model.sealed", rename=True)
    names = tmp_path / "model.sealed.names"
    assert names.stat().st_mode & 0o077 == 0
    assert msgspec.json.decode(names.read_bytes())["p0"] == "secret_places"
    assert load_sealed(file, ANYONE).metric.__name__ == "metric"


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.sum() > 0 else -self.layer(x)


class Counting(Branches):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) * self.calls


def small_job(model: Any, **changes: Any) -> Job:
    x, y = np.eye(3, dtype=np.float32).repeat(4, 0), np.arange(12) % 3
    return Job(model, lambda: Data(x, y, x, y), "sgd(lr=0.1)", nn.functional.cross_entropy, batch=4, **changes)


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (small_job(Branches), "PyTorch cannot export this job, .* data-dependent"),
        (small_job(Counting), "must compute the gradients of the job itself, got a loss of"),
        (
            small_job(lambda: nn.Linear(3, 3), metric=lambda o, y: float(len(set(o.flatten().tolist())))),
            "PyTorch cannot export this job",
        ),
    ],
    ids=["branch on a value", "a number that changes", "a metric in Python"],
)
def test_what_cannot_be_exported_is_refused_in_one_sentence(job: Job, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason) as caught:
        sections_of(job)
    assert "\n" not in str(caught.value)


def test_jobs_without_a_model_in_torch_or_jax_are_not_sealed() -> None:
    with pytest.raises(ConfigurationError, match="only jobs with a model in torch or JAX can be sealed, got a Numpy"):
        flockstep.seal("softmax")


def program(*calls: Any, inputs: int = 1, outputs: Any = None) -> OperatorProgram:
    return msgspec.convert(
        {"state": [], "inputs": inputs, "calls": calls, "outputs": outputs or [{"v": 0}]}, OperatorProgram
    )


@pytest.mark.parametrize(
    "call",
    [
        ["aten::from_file", [{"t": "secret.txt"}], {}],
        ["aten::from_file.default", [{"t": "secret.txt"}], {}],
        ["aten::save.default", [{"v": 0}, {"t": "secret.txt"}], {}],
        ["aten::set_.source_Storage", [{"v": 0}, None], {}],
        ["aten::_cuda_getCurrentRawStream.default", [], {}],
        ["prim::Print.default", [{"v": 0}], {}],
        ["aten::__class__.default", [], {}],
        ["aten::linear.__call__", [], {}],
        ["default", [{"default": 1}], {}],
        ["aten::relu.default", [{"default": 1}], {}],
        ["os::system.default", [{"t": "true"}], {}],
        ["call", [], {}],
        ["aten::relu.default", [{"v": 9}], {}],
        ["aten::relu.default", [{"v": True}], {}],
        ["aten::relu.default", [{"v": 0, "t": "x"}], {}],
        ["aten::einsum.default", [{"t": "a\nimport os"}, [{"v": 0}]], {}],
        ["aten::relu.default", [{"v": 0}], {"x=__import__('os'), y": 1}],
        ["aten::relu.default", [{"c": "load"}], {}],
        ["grad_mode", [True, 0, {"v": 0}], {}],
    ],
    ids=lambda call: f"{call[0]} {call[1]} {call[2]}",
)
def test_a_program_calls_nothing_but_operators_on_its_values(call: Any) -> None:
    with pytest.raises(ConfigurationError, match="sealed job"):
        built(program(call))


def test_an_allowed_call_is_built() -> None:
    call = ["aten::einsum.default", [{"t": "ij,kj->ik"}, [{"v": 0}, {"v": 0}]], {}]
    x = torch.eye(2) * 2
    assert torch.equal(built(program(call, outputs=[{"v": 1}]))(x)[0], x @ x.T)


@pytest.mark.parametrize(
    ("place", "argument"),
    [(2, [{"v": 1}, {"v": 10}, {"v": 10}, {"v": 10}]), (2, []), (4, 3), (8, False)],
    ids=["weights of other shapes", "no weights", "more layers", "the batch second"],
)
def test_arguments_that_would_end_the_process_are_refused_before_anything_runs(place: int, argument: Any) -> None:
    sections = sections_of(JOBS["lstm"]())
    document = msgspec.json.decode(sections[MANIFEST])
    for name in ("train", "evaluate"):
        (call,) = (one for one in document["programs"][name]["calls"] if one[0] == "aten::lstm.input")
        call[1][place] = argument
    with pytest.raises(ConfigurationError, match="it is damaged"):
        job_of(sections | {MANIFEST: msgspec.json.encode(document)}, "it")


@pytest.mark.parametrize(
    "call", [None, ["aten::unbind.int", [{"v": 1}], {}], ["aten::split.Tensor", [{"v": 1}, 2], {}]]
)
def test_a_loop_over_an_axis_without_end_is_refused(call: Any) -> None:
    """The loop is in `aten::lstm`, which runs over the steps of a sequence, or in an operator that cuts a tensor."""
    sections = sections_of(JOBS["lstm"]())
    document = msgspec.json.decode(sections[MANIFEST])
    if call is None:
        document["contract"]["x"]["shape"] = [2**40]
    else:
        zeros = ["aten::zeros.default", [[2**40]], {"device": {"c": "cpu"}}]
        document["programs"]["train"] = msgspec.to_builtins(program(zeros, call))
    with pytest.raises(ConfigurationError, match="must call at most 1048576 operators in a step"):
        job_of(sections | {MANIFEST: msgspec.json.encode(document)}, "it")


def masked_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs[targets > 0], targets[targets > 0])


def test_a_job_whose_shapes_depend_on_values_is_sealed() -> None:
    job = dataclasses.replace(small_job(lambda: nn.Linear(3, 3)), loss=masked_loss)
    assert msgspec.json.decode(sections_of(job)[MANIFEST])["programs"]["loss"]["calls"]


DEMANDS = Contract.of(image_data(), ("pixels",), "digit", None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train_x": np.zeros((3, 1, 28, 28), np.float32)}, r"inputs of train .* shape \(1, 8, 8\), got \(1, 28, 28\)"),
        ({"train_x": np.full((3, 1, 8, 8), 255, np.float32)}, "inputs of train .* between -0.* and .*, got 255"),
        ({"test_x": np.full((3, 1, 8, 8), np.nan, np.float32)}, "inputs of test .* must be numbers, got nan; replace"),
        ({"train_x": np.zeros((3, 1, 8, 8), np.int64)}, "inputs of train .* floating-point numbers, got whole numbers"),
        ({"test_y": np.array([0, 10, 1])}, "labels of test .* between 0 and 9, got 10; number the classes from 0"),
        ({"train_y": np.array([0, -1, 1])}, "labels of train .* between 0 and 9, got -1"),
        ({"train_y": np.zeros((3, 2), np.int64)}, r"labels of train .* shape \(\), got \(2,\)"),
    ],
    ids=["shape", "range", "not a number", "kind", "label too high", "label below 0", "shape of labels"],
)
def test_data_that_break_the_contract_are_named(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    few = {"train_x": np.zeros((3, 1, 8, 8), np.float32), "train_y": np.arange(3)}
    few |= {"test_x": few["train_x"], "test_y": few["train_y"]}
    DEMANDS.read(write_data(tmp_path / "right", Data(**few)))
    folder = write_data(tmp_path / "wrong", Data(**(few | changes)))
    with pytest.raises(ConfigurationError, match=said):
        DEMANDS.read(folder)


def test_a_folder_without_data_and_a_job_without_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"has no data of train; put there train_x\.npy"):
        DEMANDS.read(tmp_path)
    (tmp_path / "train_x.npy").write_bytes(b"damaged")
    with pytest.raises(ConfigurationError, match=r"train_x\.npy must be an array of numbers that numpy\.save wrote"):
        DEMANDS.read(tmp_path)
    file = flockstep.seal(JOBS["cnn"](), out=tmp_path / "model.sealed")
    with pytest.raises(ConfigurationError, match=r"holds no data; .* inputs: samples of shape \(1, 8, 8\)"):
        make_engine(load_sealed(file, ANYONE), 0)


def test_text_and_range_and_classes_that_the_sender_states() -> None:
    text = manifest_of(JOBS["gpt"]()).contract
    assert (text.classes, text.x.low, text.x.high) == (None, 0, 22)
    stated = manifest_of(JOBS["cnn"](), classes=12, x_range=(0, 1)).contract
    assert (stated.classes, stated.x.low, stated.x.high) == (12, 0, 1)
    with pytest.raises(ConfigurationError, match=r"x_range must be two numbers"):
        SealOptions(job="", x_range=(1,))


def test_text_files_are_read_in_windows(tmp_path: Path) -> None:
    data = dataclasses.replace(text_data())
    for part in ("train", "test"):
        (tmp_path / f"{part}.txt").write_bytes(bytes(range(20)) * 9)
    found = Contract.of(data, ("x",), "y", None).read(tmp_path)
    assert len(found.train_x) == (180 - 1) // LENGTH
    (tmp_path / "test.txt").write_bytes(b"zzzz" * 20)
    with pytest.raises(ConfigurationError, match=r"inputs of test .* between 0 and 22, got 122"):
        Contract.of(data, ("x",), "y", None).read(tmp_path)


def test_jobs_are_trained_from_images_and_from_parquet(tmp_path: Path) -> None:
    """Samples are read when they are needed, or into memory; both meet the demands before anything starts."""
    image = pytest.importorskip("PIL.Image", reason="Pillow reads images")
    arrow = pytest.importorskip("pyarrow", reason="pyarrow reads Parquet")
    parquet = pytest.importorskip("pyarrow.parquet")
    draw = np.random.default_rng(0)
    colors, rows = draw.integers(0, 256, (12, 8, 8, 3), np.uint8), draw.random((12, 3), np.float32)
    y, images, tables = np.arange(12) % 3, tmp_path / "images", tmp_path / "tables"
    tables.mkdir()
    for part in ("train", "test"):
        for number, one in enumerate(colors):
            file = images / part / "abc"[y[number]] / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            image.fromarray(one).save(file)
        parquet.write_table(arrow.table({"pixels": list(rows), "class": y}), tables / f"{part}.parquet")
    shown = (colors / np.float32(255)).transpose(0, 3, 1, 2)
    for x, size, folder in ((shown, 192, images), (rows, 3, tables)):
        job = Job(
            lambda size=size: nn.Sequential(nn.Flatten(), nn.Linear(size, 3)),
            lambda x=x: Data(x, y, x, y),
            "sgd(lr=0.1)",
            nn.functional.cross_entropy,
            batch=4,
        )
        file = flockstep.seal(job, out=tmp_path / f"{size}.sealed", columns=["pixels"], label="class")
        found = flockstep.simulate(str(file), "all_reduce", workers=2, steps=3, data=str(folder), trust="anyone")
        assert (found.summary.status, found.summary.samples) == ("finished", 24)
    sealed_images, sealed_rows = (SealedOptions(trust="anyone", data=str(one)) for one in (images, tables))
    (images / "train" / "d").mkdir()
    (images / "train" / "a" / "0.png").rename(images / "train" / "d" / "0.png")
    with pytest.raises(ConfigurationError, match=r"labels of train .* between 0 and 2, got 3"):
        load_sealed(tmp_path / "192.sealed", sealed_images).data()
    parquet.write_table(arrow.table({"pixels": list(rows[:, :2]), "class": y}), tables / "test.parquet")
    with pytest.raises(ConfigurationError, match=r"inputs of test .* the shape \(3,\), got \(2,\)"):
        load_sealed(tmp_path / "3.sealed", sealed_rows).data()


def test_a_plan_names_the_command_with_the_options_of_the_sealed_job(tmp_path: Path) -> None:
    file = flockstep.seal(JOBS["cnn"](), out=tmp_path / "model.sealed")
    data = write_data(tmp_path / "some data", JOBS["cnn"]().data())
    found = flockstep.plan(str(file), workers=2, hybrid=True, budget=0, data=str(data), trust="anyone")
    assert f"train {file} --data '{data}' --trust anyone" in str(found)


def test_options_of_sealed_jobs_are_refused_elsewhere() -> None:
    with pytest.raises(ConfigurationError, match="--data is for a job that flockstep seal wrote, got quadratic"):
        flockstep.simulate("quadratic", "all_reduce", workers=2, steps=1, data="folder")


def test_sections_are_those_of_a_sealed_job(tmp_path: Path) -> None:
    file = flockstep.seal(JOBS["cnn"](), out=tmp_path / "model.sealed")
    assert set(archive.read(file, SECTIONS, "anyone")) == {"manifest", "tensors"}
    with pytest.raises(ConfigurationError, match="must hold manifest, got tensors"):
        archive.read(file, SECTIONS[:1], "anyone")


def test_a_digest_of_data_notices_values_of_equal_size(tmp_path: Path) -> None:
    folder = write_data(tmp_path / "data", image_data())
    before = facts_of(folder)
    assert facts_of(folder) == before
    np.save(folder / "train_x.npy", image_data().train_x[::-1])
    assert facts_of(folder) != before


def test_a_digest_of_data_reads_a_fixed_amount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file of 1 TiB, of which nothing is on the disk, and of a thousand files."""
    with (tmp_path / "train_x.npy").open("wb") as file:
        file.truncate(1 << 40)
    for number in range(1000):
        (tmp_path / f"{number}.txt").write_bytes(b"x")
    whole, read = hashlib.sha256, []

    class Digest:
        def __init__(self, data: bytes) -> None:
            self.inner = whole(data)

        def update(self, data: bytes) -> None:
            read.append(len(data))
            self.inner.update(data)

        def hexdigest(self) -> str:
            return self.inner.hexdigest()

    monkeypatch.setattr(hashlib, "sha256", Digest)
    assert len(facts_of(tmp_path)["data"]) == 16
    assert 0 < sum(read) <= 64 * 64 * 4096


def test_a_run_says_once_what_its_data_are_not(tmp_path: Path) -> None:
    data = image_data()
    wide = Data(data.train_x.astype(np.float64), data.train_y, data.test_x, data.test_y)
    few = Data(data.train_x[:20], data.train_y[:20], data.test_x, data.test_y)
    file = flockstep.seal(JOBS["cnn"](), out=tmp_path / "model.sealed")
    for name, one, said in (
        ("right", data, []),
        ("wide", wide, ["are float64, and were rounded to the dtype of the model"]),
        ("few", few, ["has 20 training samples, and the workers use 32 in a step"]),
    ):
        folder = write_data(tmp_path / name, one)
        found = flockstep.simulate(str(file), "all_reduce", workers=2, steps=2, data=str(folder), trust="anyone")
        assert len(found.summary.notes) == len(said)
        assert all(words in note for words, note in zip(said, found.summary.notes, strict=True))
