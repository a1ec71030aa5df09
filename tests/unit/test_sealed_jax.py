"""Sealed JAX jobs: programs have the bits of the job, call nothing outside them, and tell nothing of the source."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import flockstep
from flockstep.errors import ConfigurationError
from flockstep.frameworks.base import DistillationTargets
from flockstep.frameworks.job import make_engine
from flockstep.options import SealedOptions, SealOptions
from support.matrix import few
from support.sealed_data import words_of, write_data

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402 - where JAX is not installed the file ends above

from flockstep.frameworks.jax import JaxModel  # noqa: E402
from flockstep.sealed.job import job_of, load_sealed, sealed  # noqa: E402
from flockstep.sealed.manifest import MANIFEST, SealedManifest  # noqa: E402
from support import jax_jobs, sealed_jax_jobs  # noqa: E402
from support.sealed_jax_jobs import JAX_JOBS  # noqa: E402

NAMES = ("joint", "evaluate", "score")


@pytest.fixture(scope="module")
def sections() -> dict[str, bytes]:
    """The sections of a small sealed job."""
    return sealed(jax_jobs.job(), SealOptions(job="", rename=True))[0]


@pytest.mark.parametrize("name", few(JAX_JOBS, "images"))
def test_a_sealed_jax_job_has_the_bits_of_the_job(name: str, tmp_path: Path) -> None:
    job, data = JAX_JOBS[name](), write_data(tmp_path / "data", JAX_JOBS[name]().data())
    file = flockstep.seal(job, out=tmp_path / "model.sealed", seed=3)
    again = load_sealed(file, SealedOptions(trust="anyone", data=str(data)))
    engines: list[Any] = [make_engine(one, 3) for one in (job, again)]
    assert [entry.name for entry in engines[0].schema.entries] == [entry.name for entry in engines[1].schema.entries]
    params = engines[0].initial()
    assert np.array_equal(params, engines[1].initial())
    for step in range(4):
        outs, samples = [np.empty_like(params) for _ in engines], np.arange(1 + 5 * step) * 3
        losses = [one.gradient(params, samples, out, 1, step) for one, out in zip(engines, outs, strict=True)]
        assert losses[0] == losses[1]
        assert np.array_equal(*outs)
        params = params - np.float32(0.1) * outs[0]
    assert engines[0].evaluate(params) == engines[1].evaluate(params)
    many = np.stack([params * np.float32(factor) for factor in (1, 0.9, 0.8)])
    outs = [np.empty_like(many) for _ in engines]
    for one, out in zip(engines, outs, strict=True):
        one.gradients(many, np.arange(24).reshape(3, 8), out, [0, 1, 2], [5, 5, 5])
    assert np.array_equal(*outs)
    assert (job.batch, job.higher_is_better) == (again.batch, again.higher_is_better)
    assert again.metric == "accuracy" or again.metric.__name__ == "nats_per_token"


def test_nothing_of_the_source_travels(tmp_path: Path) -> None:
    source = Path(sealed_jax_jobs.__file__).read_text("utf-8")
    hidden = {word for word in words_of(source) if "secret" in word or "hidden" in word} | {"nats_per_token"}
    lines = [line.strip() for line in source.splitlines() if len(line.strip()) > 12]
    assert {"hidden_convolution", "secret_step", "secret_entropy"} <= hidden
    for name, job in JAX_JOBS.items():
        data = flockstep.seal(job(), out=tmp_path / f"{name}.sealed", rename=True).read_bytes()
        assert [word for word in (*hidden, *lines, "sealed_jax_jobs", "site-packages") if word.encode() in data] == []
        assert str(Path(sealed_jax_jobs.__file__).parent).encode() not in data
        assert b"loc(" not in data


def with_callback(params: Any, x: Any) -> Any:
    jax.debug.callback(print, x)
    return jax_jobs.apply(params, x)


def by_solving(params: Any, x: Any) -> Any:
    return jax_jobs.apply(params, x) * jnp.linalg.inv(params["out"]["w"].T @ params["out"]["w"]).sum()


def branching(params: Any, x: Any) -> Any:
    return jax_jobs.apply(params, x) if float(x.sum()) > 0 else jax_jobs.apply(params, -x)


def joined(params: Any, x: Any) -> Any:
    return jax_jobs.apply(params, x).reshape(-1)


def squares(outputs: Any, y: Any) -> Any:
    return (outputs**2).mean()


def python_metric(outputs: Any, y: Any) -> float:
    return float(outputs.sum())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": lambda: JaxModel(jax_jobs.init, with_callback)}, "JAX cannot export this job"),
        ({"model": lambda: JaxModel(jax_jobs.init, by_solving)}, "may not call stablehlo.custom_call of lapack"),
        ({"metric": python_metric}, "JAX cannot export this job"),
        (
            {"model": lambda: JaxModel(jax_jobs.init, joined), "loss": squares, "metric": squares},
            "the first axis of the outputs must be that of the samples",
        ),
    ],
    ids=["callback", "lapack", "a metric in Python", "samples are no axis"],
)
def test_what_cannot_be_sealed_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        sealed(jax_jobs.job(**changes), SealOptions(job=""))


def test_a_binary_jax_job_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="a binary job must have a model in torch, got a JAX job"):
        sealed(jax_jobs.job(), SealOptions(job="", binary=True))


BROADCAST = """
%d = stablehlo.get_dimension_size %arg4, dim = 0 : (tensor<?x4xf32>) -> tensor<i32>
%r = stablehlo.reshape %d : (tensor<i32>) -> tensor<1xi32>
%c = stablehlo.constant dense<5> : tensor<1xi32>
%s = stablehlo.concatenate %r, %c, dim = 0 : (tensor<1xi32>, tensor<1xi32>) -> tensor<2xi32>
%0 = stablehlo.dynamic_broadcast_in_dim %arg2, %s, dims = [1] : (tensor<3xf32>, tensor<2xi32>) -> tensor<?x3xf32>
return %0 : tensor<?x3xf32>
"""
"""Instructions whose shapes do not fit together."""
CALL = """
module @x { func.func public @main(%arg0: tensor<6xf32>, %arg1: tensor<4x6xf32>, %arg2: tensor<3xf32>,
%arg3: tensor<6x3xf32>, %arg4: tensor<?x4xf32>) -> tensor<?x3xf32> { BODY } }
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            """%0 = stablehlo.custom_call @xla_ffi_python_cpu_callback(%arg4) {api_version = 4 : i32}
            : (tensor<?x4xf32>) -> tensor<?x3xf32>\nreturn %0 : tensor<?x3xf32>""",
            "may not call stablehlo.custom_call of xla_ffi_python_cpu_callback",
        ),
        (
            f'%p = "stablehlo.partition_id"() : () -> tensor<ui32>{BROADCAST}',
            "may not call stablehlo.partition_id",
        ),
        ('%0 = "tensor.empty"() : () -> tensor<9x3xf32>\nreturn %0 : tensor<9x3xf32>', "it is damaged"),
        (
            BROADCAST,
            "it is damaged",
        ),
    ],
    ids=["a call of Python", "the number of a device", "another dialect", "shapes that do not fit"],
)
def test_a_program_that_does_more_than_compute_is_refused(body: str, said: str, sections: dict[str, bytes]) -> None:
    with pytest.raises(ConfigurationError, match=said):
        job_of(sections | {"evaluate": CALL.replace("BODY", body).encode()}, "it")


@pytest.mark.parametrize("name", NAMES)
def test_a_program_in_the_place_of_another_is_refused(name: str, sections: dict[str, bytes]) -> None:
    other = NAMES[NAMES.index(name) - 1]
    with pytest.raises(ConfigurationError, match=r"must be a function|must have axes of a fixed length"):
        job_of(sections | {name: sections[other]}, "it")


def test_a_sealed_jax_job_without_a_program_or_of_other_shapes_is_refused(sections: dict[str, bytes]) -> None:
    with pytest.raises(ConfigurationError, match="it is damaged"):
        job_of({name: one for name, one in sections.items() if name != "joint"}, "it")
    manifest = msgspec.json.decode(sections[MANIFEST], type=SealedManifest)
    contract = msgspec.structs.replace(manifest.contract, x=msgspec.structs.replace(manifest.contract.x, shape=(5,)))
    other = msgspec.json.encode(msgspec.structs.replace(manifest, contract=contract))
    with pytest.raises(ConfigurationError, match=r"must be a function .*4xf32|must be a function .*5xf32"):
        job_of(sections | {MANIFEST: other}, "it")


def test_learning_from_predictions_is_refused(sections: dict[str, bytes]) -> None:
    again = dataclasses.replace(job_of(sections, "it"), data=jax_jobs.data)
    engine = make_engine(again, 0)
    targets = DistillationTargets(engine.initial()[None], 0.5)
    with pytest.raises(flockstep.errors.CompositionError, match="cannot learn from the predictions of other models"):
        engine.distil(engine.initial(), np.arange(4), np.empty_like(engine.initial()), targets, 0, 0)
