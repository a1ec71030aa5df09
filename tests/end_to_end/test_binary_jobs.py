"""Sealed jobs that are compiled to libraries: what they compute, what travels, and where they are refused."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import flockstep
import support.compiler  # noqa: F401
from flockstep import Job
from flockstep.errors import ConfigurationError
from flockstep.frameworks.job import make_engine
from flockstep.frameworks.torch import TorchEngine
from flockstep.options import SealedOptions, SealOptions
from flockstep.sealed import archive
from flockstep.sealed.binary import this_platform
from flockstep.sealed.job import job_of, load_sealed, sealed
from flockstep.sealed.manifest import MANIFEST, SealedManifest
from support.keys import key
from support.matrix import few
from support.sealed_data import write_data, write_job
from support.sealed_jobs import JOBS
from support.sealed_runs import TESTS, evaluations, trained

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs g++")


@pytest.mark.parametrize("name", few(JOBS, "normed"))
def test_a_binary_job_trains_as_the_job(name: str) -> None:
    job = JOBS[name]()
    sections = sealed(job, SealOptions(job="", rename=True, binary=True))[0]
    manifest = msgspec.json.decode(sections[MANIFEST], type=SealedManifest)
    assert manifest.programs == {}
    again = dataclasses.replace(job_of(sections, "it"), data=job.data)
    engines: list[Any] = [make_engine(job, 0), make_engine(again, 0)]
    assert all(isinstance(one, TorchEngine) for one in engines)
    params, outs = engines[0].initial(), [np.empty_like(engines[0].initial()) for _ in engines]
    for step in range(6):
        samples = np.arange(16) + step
        losses = [one.gradient(params, samples, out, 1, step) for one, out in zip(engines, outs, strict=True)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
        assert np.linalg.norm(outs[1] - outs[0]) <= 1e-4 * np.linalg.norm(outs[0])
        params = params - np.float32(0.1) * outs[0]
    np.testing.assert_allclose(engines[1].buffers(1), engines[0].buffers(1), rtol=1e-4, atol=1e-6)
    assert engines[1].evaluate(params, [1]).loss == pytest.approx(engines[0].evaluate(params, [1]).loss, rel=1e-4)


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the keys of a sender, and a signed binary job `model.sealed`."""
    folder = tmp_path_factory.mktemp("binary")
    private, _ = key(folder, "sender")
    flockstep.seal(JOBS["cnn"](), out=folder / "model.sealed", rename=True, binary=True, sign=private)
    write_data(folder / "data", JOBS["cnn"]().data())
    return folder


def trusted(folder: Path) -> Job:
    return load_sealed(
        folder / "model.sealed", SealedOptions(trust=str(folder / "sender.pub"), data=str(folder / "data"))
    )


@pytest.mark.parametrize(
    ("kind", "strategy"),
    few([("train", "all_reduce"), ("train", "gossip"), ("simulate", "gossip")], ("train", "gossip")),
)
def test_a_binary_job_trains_across_processes(kind: str, strategy: str, binary: Path, tmp_path: Path) -> None:
    given = [kind, "model.sealed", "--data", "data", "--trust", "sender.pub"]
    words = ["-s", strategy, "-n", "2", "--steps", "40", *(["--transport", "ipc"] if kind == "train" else [])]
    theirs = trained(binary, str(tmp_path / "theirs"), *given, *words)
    if (kind, strategy) == ("train", "gossip"):  # who meets whom depends on time: no two runs are alike
        assert evaluations(theirs)[-1][0] < 0.9 * evaluations(theirs)[0][0]
        return
    ours = trained(tmp_path, "ours", kind, str(write_job(tmp_path, "cnn")), *words, path=TESTS)
    right, found = ours.parameters()[0], theirs.parameters()[0]
    assert np.linalg.norm(found - right) <= 1e-4 * np.linalg.norm(right)
    np.testing.assert_allclose(evaluations(theirs), evaluations(ours), rtol=1e-3)


def test_a_binary_job_names_neither_its_source_nor_folders_of_the_sender(binary: Path) -> None:
    data = (binary / "model.sealed").read_bytes()
    assert [word for word in (b"sealed_jobs", b"label_smoothing", b"image_data") if word in data] == []
    assert re.findall(rb"/(?:root|home|work|tmp)/[\w./-]{4,60}", data) == []


def test_native_code_needs_a_signature(binary: Path) -> None:
    assert make_engine(trusted(binary), 0).evaluate(make_engine(trusted(binary), 0).initial()).loss > 0
    with pytest.raises(ConfigurationError, match="is a binary job, which runs as native code of its sender"):
        load_sealed(binary / "model.sealed", SealedOptions(trust="anyone"))


def test_a_binary_job_of_another_platform_is_refused(binary: Path) -> None:
    sections = archive.read(
        binary / "model.sealed", ("manifest", "tensors", "joint", "evaluate", "score"), str(binary / "sender.pub")
    )
    manifest = msgspec.json.decode(sections[MANIFEST], type=SealedManifest)
    other = msgspec.json.encode(msgspec.structs.replace(manifest, platform="Linux sparc64 torch 9"))
    said = re.escape(f"compiled for Linux sparc64 torch 9, and this is {this_platform()}")
    with pytest.raises(ConfigurationError, match=said):
        job_of(sections | {MANIFEST: other}, "it")


def test_a_binary_job_is_loaded_and_trained_without_a_compiler(binary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert shutil.which("g++") is None
    engine = make_engine(trusted(binary), 0)
    assert np.isfinite(engine.gradient(engine.initial(), np.arange(8), np.empty_like(engine.initial())))
