"""Seals a job, so that others can train it without its source, and loads a sealed job as an ordinary job."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.job import make_engine
from flockstep.optimizers.base import Optimizer
from flockstep.options import SealedOptions, SealOptions
from flockstep.sealed import archive
from flockstep.sealed.contract import Contract, facts_of
from flockstep.sealed.manifest import MANIFEST, SECTIONS, TENSORS, OperatorProgram, SealedManifest, SealedTensor
from flockstep.workloads.base import require_module

if TYPE_CHECKING:
    from flockstep.frameworks.torch import TorchEngine
    from flockstep.sealed.binary import SealedLibraries
    from flockstep.sealed.export import Exporter
    from flockstep.sealed.jax import SealedJaxPrograms
    from flockstep.sealed.model import SealedPrograms

Recorded = tuple[SealedManifest, dict[str, bytes], dict[str, str]]
"""Manifest of a job, the sections of its tensors and programs, and the names that were replaced: new name → name."""
ROUNDING = 1e-5
"""Share by which the metric of a sealed JAX job, which is one program, may differ from that of the job, which calls one
operation after the other."""
TRIAL_STEPS = 2
"""Number of gradients that are compared with those of the unsealed job before a sealed job is written."""


def sealed(job: Job, settings: SealOptions) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the sections of a sealed job, and the names that were replaced: new name → name.

    Raises:
        ConfigurationError: PyTorch or JAX cannot export the job, its settings cannot be written as text, or the sealed
            job would compute other gradients.
    """
    engine: Any = make_engine(job, settings.seed)
    manifest, programs, renamed = _recorder(engine, settings.binary)(job, engine, settings)
    sections = {MANIFEST: msgspec.json.encode(manifest), **programs}
    _require_equal(job, engine, _again(sections, job, settings.seed), near_metric=ROUNDING if manifest.jax else 0.0)
    if settings.binary:
        from flockstep.sealed.binary import as_libraries

        sections = as_libraries(sections, lambda count: engine.samples(np.arange(count) % engine.train_size))
        _require_equal(job, engine, _again(sections, job, settings.seed), near=engine.tolerance)
    return sections, renamed


def _recorder(engine: Any, binary: bool) -> Callable[[Job, Any, SealOptions], Recorded]:
    """Return the function that records jobs with such an engine."""
    torch, jax = (sys.modules.get(f"flockstep.frameworks.{name}") for name in ("torch", "jax"))
    if torch is not None and isinstance(engine, torch.TorchEngine):
        return _of_torch
    if jax is None or not isinstance(engine, jax.JaxEngine):
        kind = type(engine).__name__.removesuffix("Engine")
        raise ConfigurationError(
            f"only jobs with a model in torch or JAX can be sealed, got a {kind} job; write the model in one of them"
        )
    if binary:
        raise ConfigurationError(
            "a binary job must have a model in torch, got a JAX job, which each process compiles; leave --binary out"
        )
    return _of_jax


def _again(sections: Mapping[str, bytes], job: Job, seed: int) -> Any:
    """Return the engine of a sealed job on the data of the job itself."""
    return make_engine(dataclasses.replace(job_of(sections, "the sealed job"), data=job.data), seed)


def _settings(job: Job, engine: Any, settings: SealOptions) -> SealedManifest:
    """Return the manifest of a job without tensors and programs."""
    from flockstep import __version__

    contract = Contract.of(engine._data, tuple(settings.columns), settings.label, settings.classes)
    if settings.x_range:
        low, high = settings.x_range
        contract = msgspec.structs.replace(contract, x=msgspec.structs.replace(contract.x, low=low, high=high))
    metric = job.metric if isinstance(job.metric, str) else getattr(job.metric, "__name__", "metric")
    return SealedManifest(
        flockstep=__version__,
        torch="",
        name="sealed" if settings.rename else job.name,
        seed=settings.seed,
        tensors=(),
        programs={},
        outputs=0,
        metric="metric" if settings.rename and job.metric != "accuracy" else metric,
        higher_is_better=job.higher_is_better,
        optimizer=_as_text(engine.optimizer),
        schedule=settings.schedule or job.schedule,
        batch=job.batch,
        epochs=job.epochs,
        least_steps=job.least_steps,
        target=job.target,
        contract=contract,
    )


def _of_jax(job: Job, engine: Any, settings: SealOptions) -> Recorded:
    from flockstep.sealed.jax import recorded

    metric = None if isinstance(job.metric, str) else job.metric
    return recorded(_settings(job, engine, settings), engine, metric, settings.rename)


def _of_torch(job: Job, engine: TorchEngine, settings: SealOptions) -> Recorded:
    """Export the programs of a job, and collect its tensors under the names that they will have."""
    import torch
    from safetensors.torch import save

    from flockstep.sealed.export import Exporter

    module = engine.module
    held = dict(itertools.chain(module.named_parameters(), module.named_buffers()))
    short = {
        name: f"{'p' if isinstance(one, torch.nn.Parameter) else 'b'}{n}" for n, (name, one) in enumerate(held.items())
    }
    names = short if settings.rename else {name: name for name in held}
    exporter = Exporter({id(one): names[name] for name, one in held.items()})
    programs, outputs = _programs(job, engine, exporter)
    manifest = msgspec.structs.replace(
        _settings(job, engine, settings),
        torch=str(torch.__version__),
        tensors=tuple(
            SealedTensor(names[name], one.requires_grad, isinstance(one, torch.nn.Parameter))
            for name, one in held.items()
        ),
        programs=programs,
        outputs=outputs,
    )
    values = {names[name]: one for name, one in held.items()} | exporter.constants
    tensors = save({name: one.detach().clone().contiguous() for name, one in values.items()})
    return manifest, {TENSORS: tensors}, {new: name for name, new in names.items() if new != name}


def _programs(job: Job, engine: TorchEngine, exporter: Exporter) -> tuple[dict[str, OperatorProgram], int]:
    """Return the programs of a job by name, and the number of tensors in the model's outputs, 0 for a tensor alone."""
    import torch
    from torch.utils import _pytree as pytree

    from flockstep.sealed.export import OfOutputs

    module = engine.module
    many = np.arange(max(2, engine._batch_size)) % engine.train_size
    (x, y), (x2, y2) = engine.samples(many), engine.samples(np.append(many, 0))
    buffers = engine.buffers(0)
    found: dict[str, OperatorProgram] = {}
    try:
        found["train"] = exporter.export(module.train(), [x], [x2])
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            found["evaluate"] = exporter.export(module.eval(), [x], [x2])
            given, others = module(x), module(x2)
    finally:
        module.train()
        engine.restore_buffers(0, buffers)
    leaves, spec = pytree.tree_flatten(given)
    if not all(isinstance(one, torch.Tensor) for one in leaves):
        raise ConfigurationError(f"the outputs of a sealed job's model must be tensors, got {type(given).__name__}")
    arguments = [*leaves, y], [*pytree.tree_leaves(others), y2]
    kept = [one.detach().requires_grad_(one.is_floating_point()) for one in arguments[0][:-1]], arguments[0][-1]
    found["loss"] = exporter.export(OfOutputs(engine.loss, spec), [*kept[0], kept[1]], arguments[1])
    if job.metric != "accuracy":
        with torch.no_grad():
            found["metric"] = exporter.export(OfOutputs(engine._metric, spec), *arguments, strict=True)
    return found, 0 if isinstance(given, torch.Tensor) else len(leaves)


def _as_text(optimizer: Optimizer) -> str:
    """Return an optimizer as an expression; refuse one that cannot be written as text."""
    text = str(optimizer)
    try:
        Optimizer.parse(text)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"the optimizer of a sealed job must be one of flockstep's, got {text}: {error}; use sgd(lr=0.1)"
        ) from None
    return text


def _require_equal(job: Job, ours: Any, theirs: Any, *, near: float = 0.0, near_metric: float = 0.0) -> None:
    """Raise `ConfigurationError` unless a sealed job computes what the job does: gradients, buffers, metrics.

    They may differ by the share `near` of their norm, as libraries round otherwise, and metrics by `near_metric`; by
    default they must have equal bits.
    """

    def differ(values: FlatArray, right: FlatArray, near: float = near) -> bool:
        distance, size = np.linalg.norm((values - right).astype(np.float64)), np.linalg.norm(right.astype(np.float64))
        return not distance <= near * size

    params, out, other = ours.initial(), np.empty_like(ours.initial()), np.empty_like(ours.initial())
    buffers = ours.buffers(0)
    for step in range(TRIAL_STEPS):
        samples = (np.arange(job.batch - step or 1) * 7 + step) % ours.train_size
        losses = ours.gradient(params, samples, out, 0, step), theirs.gradient(params, samples, other, 0, step)
        pairs = [(np.array(losses[1]), np.array(losses[0])), (other, out), (theirs.buffers(0), ours.buffers(0))]
        if any(itertools.starmap(differ, pairs)):
            raise ConfigurationError(
                f"the exported job must compute the gradients of the job itself, got a loss of {losses[1]:.9g} for "
                f"{losses[0]:.9g}; leave out of the model what depends on more than its inputs, such as Python numbers "
                "that change"
            )
    found, right = theirs.evaluate(params), ours.evaluate(params)
    if differ(np.array(found.loss), np.array(right.loss)) or differ(
        np.array(found.metric), np.array(right.metric), max(near, near_metric)
    ):
        raise ConfigurationError(
            f"the exported job must evaluate as the job itself, got {found} for {right}; seal it without parts that "
            "depend on the mode of evaluation in another way than torch's modules"
        )
    ours.restore_buffers(0, buffers)


def job_of(sections: Mapping[str, bytes], what: object) -> Job:
    """Return the job that the sections of a sealed file hold, without data; refuse damaged sections."""
    manifest = archive.decoded(sections.get(MANIFEST, b""), SealedManifest, what)
    library = "jax" if manifest.jax else "torch"
    require_module(library, library, "this sealed job")
    programs: SealedPrograms | SealedLibraries | SealedJaxPrograms
    if manifest.jax:
        from flockstep.sealed.jax import SealedJaxPrograms

        programs = SealedJaxPrograms(manifest, sections, what)
    elif manifest.platform:
        from flockstep.sealed.binary import SealedLibraries

        programs = SealedLibraries(manifest, sections, what)
    else:
        from flockstep.sealed.model import SealedPrograms

        programs = SealedPrograms(manifest, sections.get(TENSORS, b""), what)
    return Job(
        model=programs.model,
        data=partial(_no_data, what, manifest.contract),
        optimizer=Optimizer.parse(manifest.optimizer),
        loss=programs.loss,
        metric=programs.metric,
        higher_is_better=manifest.higher_is_better,
        batch=manifest.batch,
        epochs=manifest.epochs,
        least_steps=manifest.least_steps,
        target=manifest.target,
        name=manifest.name,
        schedule=manifest.schedule,
    )


def _no_data(what: object, contract: Contract) -> Data:
    raise ConfigurationError(f"{what} holds no data; give a folder with --data that has {contract}")


def load_sealed(path: Path | str, given: SealedOptions) -> Job:
    """Return the job in a sealed file, with the data of the folder that the options name.

    Raises:
        ConfigurationError: the file is damaged, or signed by nobody who is trusted, or the data do not meet its
            demands.
        MissingDependency: the library of the job's model is not installed.
    """
    sections = archive.read(path, SECTIONS, given.trust, given.key)
    manifest = archive.decoded(sections.get(MANIFEST, b""), SealedManifest, path)
    if manifest.platform and given.trust == archive.ANYONE:
        raise ConfigurationError(
            f"{path} is a binary job, which runs as native code of its sender; give the sender's public key with "
            "--trust FILE"
        )
    job = job_of(sections, path)
    if given.data is None:
        return job
    contract = manifest.contract
    return dataclasses.replace(job, data=partial(contract.read, given.data), facts=facts_of(given.data))
