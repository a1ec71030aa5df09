"""The interface between drivers and frameworks: jobs, data, and engines that compute gradients and evaluations."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from flockstep.arrays.factors import FactoredWeight
from flockstep.arrays.schema import FlatArray, Schema
from flockstep.errors import CompositionError, ConfigurationError, require
from flockstep.frameworks.streams import SampleColumn, columns_of
from flockstep.optimizers.base import Optimizer

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Evaluation:
    """Mean loss and metric of one model on the test set."""

    loss: float
    metric: float


@dataclass(frozen=True, eq=False)
class Data:
    """The training and test samples of a job, as numpy arrays or torch tensors whose first axis counts the samples.

    `Data.of` accepts data sets, loaders and iterables instead of arrays.
    """

    train_x: Any
    train_y: Any
    test_x: Any
    test_y: Any

    def __post_init__(self) -> None:
        for name in ("train", "test"):
            x, y = getattr(self, f"{name}_x"), getattr(self, f"{name}_y")
            if len(x) != len(y) or len(x) == 0:
                raise ConfigurationError(
                    f"{name}_x and {name}_y must hold the same number of samples, at least one, got {len(x)} and "
                    f"{len(y)}; give one target for each sample"
                )

    @classmethod
    def of(cls, train: Any, test: Any) -> Data:
        """Return data whose samples are read when they are needed; the next batch is read in advance.

        Each argument is one of these: a data set (`__len__`, and `__getitem__` that returns a pair (x, y)); a PyTorch
        DataLoader, whose data set and collate function are used; a finite iterable of pairs, which is read into memory;
        or a pair of arrays. The job draws the batches, so a loader's batch size and order have no effect. Reading a
        sample twice must give the same values.

        Raises:
            ConfigurationError: the samples cannot be counted, are not pairs, or change from one reading to the next.
        """
        return cls(*columns_of(train, "train"), *columns_of(test, "test"))


@dataclass(frozen=True, eq=False)
class Job:
    """A training job: everything about the training that does not depend on the strategy that coordinates the
    workers.

    Args:
        model: function that builds one replica, a `torch.nn.Module`, a `flockstep.jax.JaxModel` or a
            `flockstep.frameworks.numpy.Model`.
        data: function that returns the training and test samples.
        optimizer: an `Optimizer` or an expression such as "sgd(lr=0.1)"; for a torch model also a function params →
            torch optimizer of a known class, and for a JAX model an optax optimizer, if the strategy's workers run the
            optimizer.
        loss: function (outputs, targets) → mean loss of a batch; None for a model with its own loss.
        metric: function (outputs, targets) → mean over a batch, or "accuracy".
        higher_is_better: whether larger values of the metric are better.
        batch: number of samples in a worker's batch.
        epochs: passes of all workers together over the training set.
        least_steps: minimum number of steps of each worker, however many workers share the passes.
        target: value of the metric to reach, for the time to target; None for no target.
        name: the job's name.
        parallel_plan: how `partition=tensor` splits a torch model: name of a module → style, as `parallelize_module`
            takes it; None for what follows from the layers.
        schedule: how the learning rate or the batch changes, as an expression such as "cosine", unless the run's
            options name a schedule; None for no change.

    Raises:
        ConfigurationError: batch < 1, or epochs is not positive.
    """

    model: Callable[[], Any]
    data: Callable[[], Data]
    optimizer: Optimizer | str | Any
    loss: Callable[[Any, Any], Any] | None = None
    metric: str | Callable[[Any, Any], float] = "accuracy"
    higher_is_better: bool = True
    batch: int = 32
    epochs: float = 10.0
    least_steps: int = 1
    target: float | None = None
    name: str = "job"
    facts: dict[str, str] = field(default_factory=dict)
    """Facts that must be the same when the run is repeated, such as a hash of the data; the record stores them."""
    parallel_plan: Any = None
    schedule: str | None = None

    def __post_init__(self) -> None:
        require(self.batch >= 1, "batch", ">= 1", self.batch, "32 is usual")
        require(self.epochs > 0, "epochs", "> 0", self.epochs, "use for example 10")

    def _repr_html_(self) -> str:
        """Return a table of the job's settings for a cell of a notebook; no model is built and no data are read."""
        shown = ("name", "optimizer", "metric", "batch", "epochs", "least_steps", "target")
        texts = {name: value if isinstance(value := getattr(self, name), str) else repr(value) for name in shown}
        rows = (
            f"<tr><th>{name.replace('_', ' ')}</th><td>{html.escape(text)}</td></tr>" for name, text in texts.items()
        )
        return f"<table>{''.join(rows)}</table>"


def metric_of(
    job: Job, data: Data, whole: object, accuracy: Callable[[Any, Any], float]
) -> Callable[[Any, Any], float]:
    """Return the job's metric as a function, for "accuracy" the framework's function; raise `ConfigurationError` if
    there is no such metric, or accuracy has no integer targets.
    """
    if not isinstance(job.metric, str):
        return job.metric
    if job.metric != "accuracy":
        raise ConfigurationError(
            f"metric must be 'accuracy' or a function (outputs, targets) → float, got {job.metric!r}; pass one of these"
        )
    if data.test_y.dtype != whole:
        raise ConfigurationError(
            f"accuracy needs integer targets, got {data.test_y.dtype}; pass metric=a function "
            f"(outputs, targets) → float"
        )
    return accuracy


@dataclass(frozen=True, eq=False)
class DistillationTargets:
    """Models from whose predictions a model learns: `teachers` (M, K), and the weight of the distance."""

    teachers: FlatArray
    weight: float


class TrainedModel(ABC):
    """The interface of the parameters of a job's model, or of a part of the model, in their initial state."""

    schema: Schema
    train_size: int

    @abstractmethod
    def initial(self) -> FlatArray:
        """Return a copy of the parameters (K,) with which every replica starts."""

    def layers(self, batch: int) -> tuple[FactoredWeight, ...]:
        """Return the fully connected layers whose gradients over `batch` samples can be computed as factors."""
        return ()


class JobData:
    """What an engine knows of a job besides its model."""

    optimizer: Optimizer
    higher_is_better: bool
    train_size: int
    labels: npt.NDArray[np.int64] | None
    """Class of every training sample (samples,); None if there are no classes or the data set names none."""
    classes: bool
    """Whether the targets of the job are classes."""
    _data: Data

    def prefetch(self, indices: Indices) -> None:
        """Start to read the batch of the training samples `indices` (batch,), if samples are read only when needed."""
        if isinstance(column := self._data.train_x, SampleColumn):
            column.reader.prefetch(indices)

    @property
    def facts(self) -> dict[str, str]:
        """Facts of the data that must be equal in every process of a run, such as the digest of an iterable."""
        column = self._data.train_x
        return {"train": column.reader.digest} if isinstance(column, SampleColumn) and column.reader.digest else {}


class Engine(TrainedModel, JobData):
    """The engine of a job in one process, which computes gradients for any number of replicas, given the replicas' flat
    parameters.

    Non-trainable buffers (batch-norm statistics) belong to a replica and are never exchanged. An evaluation uses the
    mean of the named replicas' floating-point buffers and the first replica's integer buffers.
    """

    @property
    def batching(self) -> str:
        """How gradients of several replicas are computed: "batched", or "one by one: …" with the reason."""
        return "batched"

    def operations(self, batch: int) -> float | None:
        """Return the floating-point operations of a gradient of `batch` samples; None if they are not counted."""
        return None

    def home(self) -> FlatArray:
        """Return an array (K,) for one replica's parameters, at which gradients are computed without a copy."""
        return self.initial()

    @abstractmethod
    def gradient(self, params: FlatArray, indices: Indices, out: FlatArray, replica: int = 0, step: int = 0) -> float:
        """Write the mean gradient at `params` (K,) over the samples `indices` (batch,) into `out` (K,); return the mean
        loss. `replica` and `step` seed random layers; the buffers are those of the replica.
        """

    @abstractmethod
    def gradients(
        self, params: FlatArray, indices: Indices, out: FlatArray, replicas: Sequence[int], steps: Sequence[int]
    ) -> npt.NDArray[np.float64]:
        """Write the mean gradients of R replicas into `out` (R, K); return the R mean losses. `params` is (R, K),
        `indices` (R, batch), and the others are as in `gradient`, one for each replica.
        """

    def factored(
        self,
        params: FlatArray,
        indices: Indices,
        layers: Sequence[FactoredWeight],
        out: FlatArray,
        replica: int,
        step: int,
    ) -> float:
        """Compute a gradient with the gradients of `layers` as factors, and write it to the beginning of `out` in the
        layout of `Packing(K, layers)`; raise `CompositionError` if this framework cannot compute factors.
        """
        raise CompositionError(
            "this framework cannot factor gradients; use torch, or a strategy that sends whole gradients"
        )

    def buffers(self, replica: int) -> FlatArray:
        """Return the buffers of a replica that change in training, concatenated in float64; empty if there are none."""
        return np.empty(0)

    def restore_buffers(self, replica: int, values: FlatArray) -> None:
        """Set a replica's buffers to an array that `buffers` returned, possibly in another process."""
        if len(values):
            raise ConfigurationError(
                f"this model has no buffers that change in training, got {len(values)} values; build the same model "
                "as before"
            )

    def mean_buffers(self, replicas: Sequence[int]) -> dict[str, FlatArray]:
        """Return the buffers with which `evaluate` computes: name of each buffer that changes in training → array."""
        return {}

    def distil(
        self, params: FlatArray, indices: Indices, out: FlatArray, targets: DistillationTargets, replica: int, step: int
    ) -> float:
        """Compute the gradient of the loss plus the weighted distance to the mean prediction of the teachers, and
        return the mean loss without the distance; raise `CompositionError` if this framework or model does not
        support it.

        With classes, the distance is the cross-entropy with the mean of the teachers' probabilities, otherwise the mean
        squared difference of the outputs.
        """
        raise CompositionError("this framework cannot learn from the predictions of other models; use torch")

    def evaluate_together(self, members: FlatArray, replicas: Sequence[int]) -> Evaluation:
        """Return loss and metric of the mean prediction of the models `members` (M, K), for classes the mean of the
        probabilities; raise `CompositionError` if this framework cannot average predictions.
        """
        raise CompositionError("this framework cannot average the predictions of several models; use result=best")

    def as_saved(self, params: FlatArray) -> tuple[FlatArray, Schema]:
        """Return parameters, (K,) or (M, K), in the layout of the unsplit model, and the schema of this layout."""
        return params, self.schema

    @abstractmethod
    def evaluate(self, params: FlatArray, replicas: Sequence[int] = (0,)) -> Evaluation:
        """Return loss and metric on the test set of the model with the parameters `params` (K,)."""
