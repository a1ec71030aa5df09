"""The properties of a job that a plan needs: the sizes of the model, the work of a gradient, and the samples. Finding
them requires no training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from flockstep import registry
from flockstep.arrays.schema import Schema
from flockstep.costs.cluster import ClusterShape
from flockstep.costs.layers import ModelShape
from flockstep.costs.reference import MODELS, reference
from flockstep.errors import ConfigurationError, UnknownName
from flockstep.feedback.nothing import NoFeedback
from flockstep.feedback.sender import bound_codec
from flockstep.frameworks.base import Engine, Job
from flockstep.frameworks.job import JOB_FILES, build_model, make_engine, may_define
from flockstep.frameworks.layers import file_shape, job_shape
from flockstep.frameworks.numpy import Model
from flockstep.optimizers.base import Optimizer
from flockstep.options import SealedOptions
from flockstep.partitions.base import Partition
from flockstep.planning.surrogate import SurrogateBatches
from flockstep.report import formatting
from flockstep.runtime.plan import LocalOptimizer
from flockstep.runtime.setup import UNSEALED, digest, load_job
from flockstep.simulation.compute import ComputeModel
from flockstep.simulation.handling import Overheads
from flockstep.simulation.law import mean_of
from flockstep.strategies.base import Strategy
from flockstep.workloads.base import Workload
from flockstep.workloads.sampler import steps_for

BATCH = 32
"""Batch size that is assumed for a model without a job."""
OPERATIONS = 1e10
"""Assumed floating-point operations per second of a worker whose speed is unknown."""
NOISE = 3.0
"""Noise scale in batches that is assumed if the noise scale cannot be measured, or if measuring takes too long."""
DENSE = 6.0
"""Operations per parameter and sample that a gradient is assumed to need if the work of a model is unknown, as for
dense layers.
"""
AFFORDED = 1e10
"""Largest number of floating-point operations that measuring the noise scale may take."""
NOISE_STEPS = 64
"""Number of steps of each of the three phases in which the noise scale is measured: a measurement at the initial
parameters, training, and a measurement during further training. Each takes two gradients per step.
"""
WORK = {"encode": 100.0, "decode": 20.0, "optimizer": 10.0, "reduce": 2.0}
"""Operations per element that are assumed if the machines' rates were not measured."""


@dataclass(frozen=True)
class JobProfile:
    """The properties of a job that a plan needs: the sizes of the model, the work of a gradient, and the samples."""

    name: str
    elements: int
    tensors: tuple[tuple[int, ...], ...] = ()
    """Shapes of the model's tensors; empty if the whole model is treated as one tensor."""
    dtype: str = "float32"
    batch: int = BATCH
    usual: bool = True
    """Whether `batch` is the batch size that the job itself specifies; also True if the job specifies none."""
    slots: int = 0
    """Number of arrays of the model's size that the optimizer stores."""
    work: float | None = None
    """Number of floating-point operations of a gradient; None if unknown."""
    optimizer: Optimizer | None = None
    job: Callable[[int], Job] | None = field(default=None, compare=False, repr=False)
    """Function that returns the job of a run for a given seed; None if only sizes are known, so that no model can be
    trained.
    """
    file: Path | None = field(default=None, compare=False)
    """Path of the Python file that defines the job; None for a built-in job, or for a job given as an object."""
    known_noise: float | None = None
    """Noise scale of the job's gradients; None if it is to be measured."""
    shape: ModelShape | None = field(default=None, compare=False, repr=False)
    """The layers of the model; None if they are unknown."""
    identity: str | None = None
    """The text by which a cluster file refers to the job; None if the job has no name from which it can be loaded."""

    options: tuple[str, ...] = field(default=(), compare=False)
    """Words of a command with which it reads the job's file, such as the folder of a sealed job's data."""

    @cached_property
    def surrogate_batches(self) -> SurrogateBatches:
        """The properties of the job's samples that rehearsals of strategies need if workers request more than their
        next gradient.
        """
        if self.job is None:
            return SurrogateBatches(self.batch)
        engine = make_engine(self.job(0), 0)
        return SurrogateBatches(self.batch, engine.train_size, engine.layers(self.batch))

    @cached_property
    def splits(self) -> dict[Partition, Any]:
        """Partition → what plans know of the job's model as a run splits it, for partitions that were looked at."""
        return {}

    @cached_property
    def noise(self) -> float:
        """Noise scale of the job's gradients, in batches. The value is `NOISE` if there is no job, if measuring the
        gradients takes too long, or if training diverges.
        """
        if self.known_noise is not None:
            return self.known_noise
        work = DENSE * self.elements * self.batch if self.work is None else self.work
        if self.job is None or 6 * NOISE_STEPS * work > AFFORDED:
            return NOISE
        found = gradient_noise(make_engine(self.job(0), 0), self.batch)
        return found if math.isfinite(found) else NOISE

    @property
    def itemsize(self) -> int:
        """Number of bytes of one parameter."""
        return {"float64": 8, "float32": 4}.get(self.dtype, 2)

    @property
    def nbytes(self) -> int:
        """Number of bytes of all parameters of the model."""
        return self.elements * self.itemsize

    def steps(self, workers: int) -> int | None:
        """Return the number of steps of each of `workers` workers in a run of the job, which requires reading the job's
        data; None without a job.
        """
        if self.job is None:
            return None
        job = self.job(0)
        return max(job.least_steps, steps_for(job.epochs, len(job.data().train_x), workers, self.batch))


@dataclass(frozen=True)
class Site:
    """The task and the cluster of a plan: every fact on which a prediction depends, except the strategy and the number
    of workers.
    """

    task: JobProfile
    cluster: ClusterShape

    @property
    def _measured(self) -> bool:
        """Whether the cluster's compute model was measured with this job."""
        return self.task.identity is not None and self.cluster.job == self.task.identity and self.task.usual

    @property
    def seconds(self) -> float | None:
        """Mean duration of a gradient in seconds, on a worker of speed 1; None if the cluster's compute model
        determines the duration.
        """
        if self._measured or self.task.work is None or self.cluster.operations is None:
            return None
        return self.cluster.overhead + self.task.work / self.cluster.operations

    def compute(self, workers: int) -> ComputeModel:
        """Return the compute model of the gradients of a run with `workers` workers.

        Raises:
            ConfigurationError: the cluster cannot have that number of workers.
        """
        return self.cluster.compute(self.seconds, workers)

    @property
    def link(self) -> tuple[float, float]:
        """Latency in seconds and bandwidth in bytes per second of the slowest link."""
        if self.cluster.workers > 1:
            wire = self.cluster.slowest
        elif self.cluster.wires:
            wire = max(self.cluster.wires, key=lambda one: 1 / one.bandwidth)
        else:
            return 0.0, math.inf
        return wire.latency, wire.bandwidth

    @property
    def transit(self) -> float:
        """Duration in seconds of the transfer of the whole model over the slowest link."""
        latency, bandwidth = self.link
        return latency + self.task.nbytes / bandwidth

    def rate(self, what: str, name: str) -> float:
        """Return the throughput, in elements per second, of a worker's operation `what` (encoding, decoding, optimizer
        step or reduction): the measured value, or otherwise an estimate from the number of operations per element.
        """
        measured: Mapping[str, float] = getattr(self.cluster.rates, what, {})
        return measured.get(name, (self.cluster.operations or OPERATIONS) / WORK[what])

    @property
    def optimizer(self) -> str:
        """Name of the optimizer with which the task trains."""
        return str(self.task.optimizer).partition("(")[0]

    def encoded(self, strategy: Strategy) -> int | None:
        """Return the number of bytes of the whole model in the encoding of the strategy's codec; None without a lossy
        codec.
        """
        codec, task = strategy.coding, self.task
        if codec is None or codec.lossless:
            return None
        shapes = task.tensors or ((task.elements,),)
        feedback = getattr(strategy, "feedback", None) or NoFeedback()
        return bound_codec(codec, feedback, shapes, 0).wire_bytes(task.elements, task.dtype)

    def work(self, strategy: Strategy, workers: int, share: float = 1.0) -> Overheads:
        """Return the durations of the work of nodes besides gradients, such as optimizer steps and encoding. A worker
        encodes in a `share` of its steps.
        """
        task, traits = self.task, strategy.traits
        add, update = 1 / self.rate("reduce", ""), task.elements / self.rate("optimizer", self.optimizer)
        receive = serve = add / task.itemsize
        step = self.cluster.step + (0.0 if traits.server_optimizer else update)
        if (once := self.encoded(strategy)) is not None:
            name = str(strategy.coding)
            decode = task.elements / self.rate("decode", name)
            step += share * (task.elements / self.rate("encode", name) + strategy.decodes(workers) * decode)
            receive, serve = 0.0, decode / once if strategy.servers_for(workers) else 0.0
        if traits.server_optimizer:
            each = update / workers if traits.delivery == "synchronous" else update
            serve += each / (once or task.nbytes)
        return Overheads(self.cluster.message, receive, serve, step, self.cluster.copy)

    def assumptions(self) -> list[str]:
        """Return sentences about the assumptions that a prediction makes where job and cluster give no information."""
        said = [
            "memory does not include activations: the layers of the model are unknown"
            if self.task.shape is None
            else "memory includes the output of every layer for a batch, but no temporary arrays inside layers"
        ]
        if len({group.speed for group in self.cluster.groups}) > 1:
            said.append(
                "one worker alone runs on the fastest machine; the first of several workers may run on a slower machine"
            )
        if self.seconds is not None:
            said.append(
                f"a gradient is assumed to take {formatting.seconds(self.seconds)} at speed 1, for its operations and "
                f"the overhead; compute of {self.cluster.name} describes only how much this time varies"
            )
        elif not self._measured:
            mean = mean_of(self.cluster.law)
            said.append(
                f"a gradient is assumed to take {formatting.seconds(mean)} as on {self.cluster.name}, whatever the "
                "job: "
                + (
                    "the number of operations of the model is not known"
                    if self.task.work is None
                    else "the description of the cluster has no operations per second"
                )
            )
        if not self.cluster.rates.encode:
            said.append(
                f"encoding is assumed to take {WORK['encode']:.0f} operations per element and decoding "
                f"{WORK['decode']:.0f}: {self.cluster.name} has no measured rates (flockstep calibrate measures rates)"
            )
        return said


def task_of(
    what: str, batch: int | None = None, imported: Job | None = None, sealed: SealedOptions = UNSEALED
) -> JobProfile:
    """Return the task that a command names: a workload, a file with `job()` or `model()` and `inputs()`, or a reference
    model.

    Raises:
        ConfigurationError: the job or the model does not exist, or it cannot be run.
    """
    if batch is not None and batch < 1:
        raise ConfigurationError(f"batch must be >= 1, got {batch}; leave it out for the job's own batch")
    if what in MODELS:
        return _of_shape(reference(what), batch)
    given = imported
    if imported is None:
        if what.endswith(".py") and Path(what).is_file() and not may_define(Path(what), "job"):
            return _of_shape(file_shape(what), batch)
        if not _loadable(what):
            known = [*registry.names("workload"), *MODELS]
            raise UnknownName.among(
                "workload or reference model",
                what.partition("(")[0],
                known,
                further="a custom job is a Python file with a function job()",
            )
        imported = load_job(what, 0, sealed)
    task = _of_job(imported, batch)

    def job(seed: int) -> Job:
        return replace(load_job(what, seed, sealed) if given is None else given, batch=task.batch)

    file = Path(what) if given is None and what.endswith(JOB_FILES) else None
    named = identity(what) if _loadable(what) else None
    return replace(task, job=job, file=file, identity=named, options=sealed.words())


def _loadable(what: str) -> bool:
    """Whether `what` is a file or the expression of a workload."""
    return what.endswith(JOB_FILES) or what.partition("(")[0] in {
        *registry.names("workload"),
        *registry.aliases("workload"),
    }


def identity(what: str) -> str:
    """Return the name by which a cluster file refers to a job: the workload's expression, or the name of the job's file
    with the digest of its content.

    The job's own name is not used, because jobs in two files may have the same name.
    """
    if what.endswith(JOB_FILES):
        return f"{Path(what).name} {digest(Path(what))}"
    return str(Workload.parse(what))


def _of_shape(model: ModelShape, batch: int | None) -> JobProfile:
    size = batch or BATCH
    dtype = {8: "float64", 2: "float16"}.get(model.itemsize, "float32")
    tensors = tuple((layer.gradients,) for layer in model.layers if layer.gradients)
    work = _work(model, size)
    return JobProfile(model.name, model.gradients, tensors, dtype, size, slots=1, work=work, shape=model)


def _work(model: ModelShape, batch: int) -> float | None:
    """Operations of a gradient; None if layers with parameters could not be counted."""
    unknown = any(layer.counted == "unknown" and layer.parameters for layer in model.layers)
    return None if unknown else float(model.work(batch)) or None


def _of_job(job: Job, batch: int | None) -> JobProfile:
    size = batch or job.batch
    usual, model = size == job.batch, build_model(job)
    if not isinstance(model, Model) and not hasattr(model, "named_parameters"):
        return _of_engine(make_engine(job, 0), job.name, size, usual)
    schema, parameters = _schema(job, model)
    optimizer = _optimizer(job, parameters)
    try:
        shape: ModelShape | None = job_shape(job)
    except ConfigurationError:  # a model that cannot be split into layers has sizes nevertheless
        shape = None
    work = None if shape is None else _work(shape, size)
    slots = 1 if optimizer is None else _slots(optimizer, schema)
    tensors = tuple(entry.shape for entry in schema.entries)
    return JobProfile(job.name, schema.size, tensors, schema.dtype, size, usual, slots, work, optimizer, shape=shape)


def _of_engine(engine: Engine, name: str, batch: int, usual: bool) -> JobProfile:
    """The profile of a job whose model has no layers, only functions, as in JAX."""
    schema, optimizer = engine.schema, engine.optimizer
    foreign = optimizer.init(engine.initial()).foreign
    slots = _slots(optimizer, schema) if foreign is None else sum(leaf.size for leaf in foreign) // schema.size
    tensors, work = tuple(entry.shape for entry in schema.entries), engine.operations(batch)
    return JobProfile(name, schema.size, tensors, schema.dtype, batch, usual, slots, work, optimizer)


def _schema(job: Job, model: Any) -> tuple[Schema, list[Any]]:
    """Shapes of the trained parameters, and torch's parameters if it is a torch model."""
    if isinstance(model, Model):
        return Schema.of(model.shapes, model.dtype), []
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    if not trained:
        raise ConfigurationError(f"the model of job {job.name!r} must have parameters to train, got none; add a layer")
    dtypes = {name: str(one.dtype).rpartition(".")[2] for name, one in trained}
    return Schema.of({name: tuple(one.shape) for name, one in trained}, dtypes), [one for _, one in trained]


def _optimizer(job: Job, parameters: list[Any]) -> Optimizer | None:
    if isinstance(job.optimizer, (Optimizer, str)):
        return Optimizer.parse(job.optimizer)
    if not parameters:
        return None
    from flockstep.frameworks.torch_optimizers import from_torch

    return from_torch(job.optimizer(parameters))


def _slots(optimizer: Optimizer, schema: Schema) -> int:
    """Number of arrays of the model's size that the optimizer keeps, found by a step on a small array."""
    params = np.zeros(len(schema.entries), np.float32)
    state = optimizer.init(params)
    state.tensors = tuple(slice(i, i + 1) for i in range(len(params)))
    with np.errstate(all="ignore"):
        optimizer.step(params, params.copy(), state, optimizer.lr)
    return sum(1 for slot in state.slots.values() if slot.size == len(params))


def gradient_noise(engine: Engine, batch: int) -> float:
    """Return the noise scale of the job's gradients in batches (B_noise / B of McCandlish et al. 2018): the variance of
    a batch's gradient, relative to the squared norm of the gradient of all samples. The result is not finite if
    training diverges.

    For the gradients a and b of two batches at equal parameters, E|a - b|²/2 = tr Σ / B and E[a · b] = |G|². The noise
    scale r changes while a job trains. A step advances training by 1 / (1 + r) of a step without noise, so the number
    of steps to a target depends on the harmonic mean of 1 + r over those steps. The result is that of two
    measurements: before training, and between steps `NOISE_STEPS` and 2 `NOISE_STEPS`.
    """
    params, first, second = engine.initial(), engine.initial(), engine.initial()
    optimizer = LocalOptimizer(engine.optimizer, params, engine.schema.slices)
    random, size = np.random.default_rng(0), min(batch, engine.train_size)

    def measured(train: bool) -> float:
        noise, signal = 0.0, 0.0
        for step in range(NOISE_STEPS):
            for out in (first, second):
                engine.gradient(params, random.choice(engine.train_size, size, replace=False), out, 0, step)
            noise += float(((first - second) ** 2).sum()) / 2
            signal += float((first * second).sum())
            if train:
                optimizer.step(params, first)
        return noise / max(signal, noise / NOISE_STEPS) if noise else 0.0

    with np.errstate(all="ignore"):
        start = measured(train=False)
        measured(train=True)
        end = measured(train=True)
        return 2 * (1 + start) * (1 + end) / (2 + start + end) - 1
