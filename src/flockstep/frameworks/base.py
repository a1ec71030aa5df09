"""What a driver needs of a framework: gradients at given flat parameters, and evaluations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from flockstep.arrays.factors import Layer
from flockstep.arrays.schema import FlatArray, Schema
from flockstep.errors import CompositionError, ConfigurationError
from flockstep.optimizers.base import Optimizer

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Evaluation:
    """Mean loss and metric of one model on the test set."""

    loss: float
    metric: float


@dataclass(frozen=True, eq=False)
class Data:
    """Training and test samples, first axis over samples; numpy arrays or torch tensors."""

    train_x: Any
    train_y: Any
    test_x: Any
    test_y: Any

    def __post_init__(self) -> None:
        for name in ("train", "test"):
            x, y = getattr(self, f"{name}_x"), getattr(self, f"{name}_y")
            if len(x) != len(y) or len(x) == 0:
                raise ConfigurationError(
                    f"{name}_x and {name}_y must hold equally many samples and at least one, got {len(x)} and {len(y)}"
                )


@dataclass(frozen=True, eq=False)
class Job:
    """What to train: everything that is the same whichever strategy coordinates the workers.

    `model` builds one replica: a `torch.nn.Module`, or a `flockstep.frameworks.numpy.Model`. `loss(outputs, targets)`
    and `metric(outputs, targets)` are means over a batch. `optimizer` is an `Optimizer`, an expression such as
    "sgd(lr=0.1)", or a function params → torch optimiser of a known class. `batch` is per worker; `epochs` counts
    passes of all workers together over the training set, but each worker takes `least_steps` steps, however many share
    the passes; `target` is the metric that time-to-target refers to.
    """

    model: Callable[[], Any]
    data: Callable[[], Data]
    optimizer: Optimizer | str | Callable[..., Any]
    loss: Callable[[Any, Any], Any] | None = None
    metric: str | Callable[[Any, Any], float] = "accuracy"
    higher_is_better: bool = True
    batch: int = 32
    epochs: float = 10.0
    least_steps: int = 1
    target: float | None = None
    name: str = "job"
    facts: dict[str, str] = field(default_factory=dict)
    """What must be the same when the run is repeated (for example a hash of the data); kept in the record."""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigurationError(f"batch must be >= 1, got {self.batch}")
        if not self.epochs > 0:
            raise ConfigurationError(f"epochs must be > 0, got {self.epochs}")


def metric_of(
    job: Job, data: Data, whole: object, accuracy: Callable[[Any, Any], float]
) -> Callable[[Any, Any], float]:
    """The job's metric, or the framework's `accuracy`, which is for targets of the dtype `whole`.

    Raises:
        ConfigurationError: there is no such metric, or the targets are no whole numbers.
    """
    if not isinstance(job.metric, str):
        return job.metric
    if job.metric != "accuracy":
        raise ConfigurationError(
            f"metric must be 'accuracy' or a function (outputs, targets) → float, got {job.metric!r}"
        )
    if data.test_y.dtype != whole:
        raise ConfigurationError(
            f"accuracy needs whole-number targets, got {data.test_y.dtype}; pass metric=a function "
            f"(outputs, targets) → float"
        )
    return accuracy


@dataclass(frozen=True, eq=False)
class Lesson:
    """Models to learn from: `teachers`, (M, K), and how much the distance to their predictions counts."""

    teachers: FlatArray
    weight: float


class Engine(ABC):
    """One job in one process: computes gradients for any number of replicas, given their flat parameters.

    Non-trainable buffers (batch-norm statistics) belong to the replica and are never exchanged; an evaluation uses
    the mean of the named replicas' floating-point buffers and the first one's integer buffers.
    """

    schema: Schema
    optimizer: Optimizer
    higher_is_better: bool
    train_size: int
    labels: npt.NDArray[np.int64] | None
    """Class of every training sample, or None where there are no classes."""

    @property
    def batching(self) -> str:
        """'batched', or 'one by one: …' with why gradients of several replicas are not computed in one call."""
        return "batched"

    @abstractmethod
    def initial(self) -> FlatArray:
        """A copy of the parameters that every replica starts from."""

    def home(self) -> FlatArray:
        """An array for one replica's parameters from which gradients are computed without a copy."""
        return self.initial()

    @abstractmethod
    def gradient(self, params: FlatArray, indices: Indices, out: FlatArray, replica: int = 0, step: int = 0) -> float:
        """Write the mean gradient over the samples `indices` at `params` into `out`; return the mean loss.

        `replica` and `step` select buffers and seed whatever is random in the model.
        """

    @abstractmethod
    def gradients(
        self, params: FlatArray, indices: Indices, out: FlatArray, replicas: Sequence[int], steps: Sequence[int]
    ) -> npt.NDArray[np.float64]:
        """The same for R replicas: params and out (R, K), indices (R, batch); return R losses."""

    def layers(self, batch: int) -> tuple[Layer, ...]:
        """The fully connected layers whose gradient over `batch` samples can be had as factors; none if in doubt."""
        return ()

    def factored(
        self, params: FlatArray, indices: Indices, layers: Sequence[Layer], out: FlatArray, replica: int, step: int
    ) -> float:
        """As `gradient`, with the gradients of `layers` as factors: `Packing(K, layers)` in the beginning of `out`.

        Raises:
            CompositionError: this framework gives no factors.
        """
        raise CompositionError("this framework gives no factors of gradients; use torch, or another strategy")

    def buffers(self, replica: int) -> FlatArray:
        """A replica's buffers that change in training, one after the other in float64; empty where there are none."""
        return np.empty(0)

    def restore_buffers(self, replica: int, values: FlatArray) -> None:
        """Set a replica's buffers to what `buffers` said, perhaps in another process."""
        if len(values):
            raise ConfigurationError(
                f"the model has no buffers that change, got {len(values)} values; build the same model"
            )

    def distil(
        self, params: FlatArray, indices: Indices, out: FlatArray, lesson: Lesson, replica: int, step: int
    ) -> float:
        """As `gradient`, of the loss plus the weighted distance to the mean prediction of the lesson's teachers.

        The distance is the cross-entropy with the mean of the teachers' probabilities where there are classes,
        otherwise the mean squared difference of the outputs. Returns the mean loss without it.

        Raises:
            CompositionError: this framework or model cannot.
        """
        raise CompositionError("this framework cannot learn from the predictions of other models; use torch")

    def evaluate_together(self, members: FlatArray, replicas: Sequence[int]) -> Evaluation:
        """Loss and metric of the mean prediction of `members`, (M, K): of class probabilities where there are classes.

        Raises:
            CompositionError: this framework cannot average predictions.
        """
        raise CompositionError("this framework cannot average the predictions of several models; use result=best")

    @abstractmethod
    def evaluate(self, params: FlatArray, replicas: Sequence[int] = (0,)) -> Evaluation:
        """Loss and metric of the model `params` on the test set."""
