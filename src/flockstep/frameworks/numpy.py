"""Models in plain numpy: the interface of models, two models with exact gradients, and the engine of such models.

Every product is a matmul over stacked matrices, one for each replica, and every sum is within one replica. So the bits
of a replica's gradient do not depend on which other replicas are computed in the same call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flockstep.arrays.factors import FactoredWeight, Packing
from flockstep.arrays.schema import FlatArray, Schema
from flockstep.errors import CompositionError, ConfigurationError, require
from flockstep.frameworks.base import Data, DistillationTargets, Engine, Evaluation, Indices, Job, metric_of
from flockstep.frameworks.streams import SampleColumn, labels_of
from flockstep.optimizers.base import Optimizer

Views = Mapping[str, FlatArray]
"""Name → array of a model's parameters or gradients. For several replicas, the first axis counts the replicas."""


class Model(ABC):
    """The interface of a numpy model, whose gradient is written by hand."""

    dtype: str = "float32"

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name → shape of every parameter, in the order of the flat array."""

    @abstractmethod
    def initial(self, random: np.random.Generator) -> Views:
        """Return the parameters with which every replica starts: name → value."""

    @abstractmethod
    def gradients(self, params: Views, x: FlatArray, y: FlatArray, out: Views) -> FlatArray:
        """Write the mean gradients of R batches into `out` (name → array (R, *shape)); return the R mean losses.

        `params` has parameters of shape (R, *shape); `x` and `y` have the shape (R, batch, …).
        """

    def factors(self, params: Views, x: FlatArray, y: FlatArray) -> Mapping[str, tuple[FlatArray, FlatArray]]:
        """Return factors of the gradients of one model's fully connected layers: name → U and V, gradient Uᵀ V."""
        return {}

    @abstractmethod
    def outputs(self, params: Views, x: FlatArray) -> FlatArray:
        """Return one model's outputs for the samples x, whose first axis counts the samples."""

    @abstractmethod
    def loss(self, params: Views, outputs: FlatArray, y: FlatArray) -> float:
        """Return the mean loss of one model over the samples with the given `outputs`."""


class QuadraticModel(Model):
    """The quadratic bowl ½ (w - x)ᵀ H (w - x), whose minimum over the data is the mean of the samples x.

    `hessian` is (d, d) and symmetric, or (d,) for a diagonal matrix. The samples, (N, d), scatter around the optimum,
    so that gradients are noisy; without noise, all samples equal the optimum. Targets are not used.
    """

    def __init__(
        self,
        hessian: npt.ArrayLike,
        start: npt.ArrayLike | None = None,
        dtype: str = "float32",
    ):
        """Start at `start`, of shape (d,), or if that is None at a draw from the standard normal distribution."""
        self.dtype = dtype
        self.hessian: FlatArray = np.array(hessian, dtype)
        size = self.hessian.shape[0] if self.hessian.ndim else 0
        if self.hessian.shape not in ((size,), (size, size)) or size == 0:
            raise ConfigurationError(
                f"hessian must have shape (d,) or (d, d), got {self.hessian.shape}; pass one row per dimension"
            )
        if self.hessian.ndim == 2 and not np.array_equal(self.hessian, self.hessian.T):
            raise ConfigurationError("hessian must be symmetric, got an asymmetric matrix; use (H + H.T) / 2")
        self.start = None if start is None else np.array(start, dtype)
        if self.start is not None and self.start.shape != (size,):
            raise ConfigurationError(
                f"start must have shape ({size},) to match the hessian, got {self.start.shape}; give one "
                "value per dimension"
            )

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"w": (len(self.hessian),)}

    def initial(self, random: np.random.Generator) -> Views:
        """Return the starting point that was given to the model, or a random point if none was given."""
        return {"w": random.standard_normal(len(self.hessian)) if self.start is None else self.start}

    def gradients(self, params: Views, x: FlatArray, y: FlatArray, out: Views) -> FlatArray:
        """Write each replica's gradient, H (w - mean x), to `out`; return the mean losses ½ (w - x)ᵀ H (w - x)."""
        apart = params["w"][:, None, :] - x
        slopes = self._times_hessian(apart)
        np.mean(slopes, axis=1, out=out["w"])
        losses: FlatArray = np.sum(apart * slopes, axis=2).mean(axis=1) / 2
        return losses

    def outputs(self, params: Views, x: FlatArray) -> FlatArray:
        """Return w - x for every sample, of shape (N, d)."""
        difference: FlatArray = params["w"] - x
        return difference

    def loss(self, params: Views, outputs: FlatArray, y: FlatArray) -> float:
        """Return the mean of ½ (w - x)ᵀ H (w - x) over the samples x."""
        return float(np.sum(outputs * self._times_hessian(outputs[None])[0], axis=1).mean(dtype=np.float64) / 2)

    def _times_hessian(self, rows: FlatArray) -> FlatArray:
        product: FlatArray = rows * self.hessian if self.hessian.ndim == 1 else rows @ self.hessian
        return product


class SoftmaxRegression(Model):
    """Linear classification with cross-entropy: logits x W + b, loss -log softmax(logits)[y] + ½ l2 ||W||²."""

    def __init__(self, features: int, classes: int, l2: float = 0.0, dtype: str = "float32"):
        if features < 1 or classes < 2:
            raise ConfigurationError(
                f"softmax regression needs features >= 1 and classes >= 2, got {features} and {classes}; count "
                "both in the data"
            )
        require(l2 >= 0, "l2", ">= 0", l2, "use 0 for no penalty")
        self.features, self.classes, self.l2, self.dtype = features, classes, l2, dtype

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (self.features, self.classes), "bias": (self.classes,)}

    def initial(self, random: np.random.Generator) -> Views:
        """Return zeros as initial parameters; any starting point is suitable, because the loss is convex."""
        return {name: np.zeros(shape) for name, shape in self.shapes.items()}

    def gradients(self, params: Views, x: FlatArray, y: FlatArray, out: Views) -> FlatArray:
        """Write the gradients xᵀ e + l2 W and Σ e, with e = (softmax - onehot) / batch; return the mean losses."""
        scalar, weight = x.dtype.type, params["weight"]
        losses, error = self._error(params, x, y)
        np.matmul(x.transpose(0, 2, 1), error, out=out["weight"])
        np.sum(error, axis=1, out=out["bias"])
        if self.l2:
            out["weight"][...] += scalar(self.l2) * weight
            losses = losses + scalar(self.l2 / 2) * np.sum((weight * weight).reshape(len(weight), -1), axis=1)
        return losses

    def factors(self, params: Views, x: FlatArray, y: FlatArray) -> Mapping[str, tuple[FlatArray, FlatArray]]:
        """Return (softmax - onehot) / batch and x as factors of W's gradient; return no factors with an l2 penalty."""
        if self.l2:
            return {}
        batched = {name: array[None] for name, array in params.items()}
        return {"weight": (x, self._error(batched, x[None], y[None])[1][0])}

    def _error(self, params: Views, x: FlatArray, y: FlatArray) -> tuple[FlatArray, FlatArray]:
        return cross_entropies(x @ params["weight"] + params["bias"][:, None, :], y)

    def outputs(self, params: Views, x: FlatArray) -> FlatArray:
        """Return the logits, of shape (N, classes)."""
        logits: FlatArray = x @ params["weight"] + params["bias"]
        return logits

    def loss(self, params: Views, outputs: FlatArray, y: FlatArray) -> float:
        """Return the mean cross-entropy of the samples plus the l2 penalty."""
        penalty = self.l2 / 2 * np.sum(params["weight"].astype(np.float64) ** 2) if self.l2 else 0.0
        return float(penalty + cross_entropy(outputs, y))


class ArrayEngine(Engine):
    """An engine whose samples are numpy arrays."""

    _start: FlatArray
    """The parameters (K,) with which every replica starts."""

    def initial(self) -> FlatArray:
        return self._start.copy()

    def _use(self, job: Job, data: Data) -> None:
        """Set what an engine knows from the job and its converted data."""
        self.higher_is_better, self._data, self.train_size = job.higher_is_better, data, len(data.train_x)
        self.classes = data.train_y.dtype == np.int64 and data.train_y.ndim == 1
        self.labels = labels_of(data.train_y) if self.classes else None
        self._metric = metric_of(job, data, np.int64, accuracy)


class NumpyEngine(ArrayEngine):
    """The engine of a job whose model is a numpy `Model`, which has no random layers and no buffers."""

    def __init__(self, job: Job, seed: int, model: Model | None = None):
        """Build the job's model (unless `model` is given) and load its data; `seed` is for the initial parameters.
        Raise `ConfigurationError` if the job needs something that a numpy model does not have.
        """
        built = job.model() if model is None else model
        if not isinstance(built, Model):
            raise ConfigurationError(
                f"a numpy engine needs a flockstep.frameworks.numpy.Model, got {type(built).__name__}"
            )
        if job.loss is not None:
            raise ConfigurationError(
                f"{type(built).__name__} defines its own loss, and the job defines another loss; leave out the loss "
                "of the job"
            )
        if not isinstance(job.optimizer, (Optimizer, str)):
            raise ConfigurationError(
                f'the optimizer of a numpy job must be an expression such as "sgd(lr=0.1)", got {job.optimizer!r}'
            )
        self.model = built
        self.schema = Schema.of(built.shapes, built.dtype)
        self.optimizer = Optimizer.parse(job.optimizer)
        self._use(job, converted(job.data(), built.dtype))
        self._start = np.empty(self.schema.size, built.dtype)
        values = built.initial(np.random.default_rng(seed))
        for name, view in self.schema.views(self._start).items():
            view[...] = values[name]

    def gradient(self, params: FlatArray, indices: Indices, out: FlatArray, replica: int = 0, step: int = 0) -> float:
        return float(self.gradients(params[None], indices[None], out[None], (replica,), (step,))[0])

    def gradients(
        self, params: FlatArray, indices: Indices, out: FlatArray, replicas: Sequence[int], steps: Sequence[int]
    ) -> npt.NDArray[np.float64]:
        x, y = self._data.train_x[indices], self._data.train_y[indices]
        losses = self.model.gradients(self._rows(params), x, y, self._rows(out))
        return np.asarray(losses, np.float64)

    def layers(self, batch: int) -> tuple[FactoredWeight, ...]:
        """Return the layers whose gradients the model can compute as factors."""
        indices = np.arange(batch) % self.train_size
        factors = self._factors(self._start, indices)
        offsets = {entry.name: entry.offset for entry in self.schema.entries}
        return tuple(FactoredWeight(offsets[name], u.shape[1], v.shape[1], len(u)) for name, (u, v) in factors.items())

    def factored(
        self,
        params: FlatArray,
        indices: Indices,
        layers: Sequence[FactoredWeight],
        out: FlatArray,
        replica: int,
        step: int,
    ) -> float:
        dense = np.empty_like(params)
        loss = self.gradient(params, indices, dense, replica, step)
        factors, names = self._factors(params, indices), {entry.offset: entry.name for entry in self.schema.entries}
        Packing(len(dense), layers).pack(dense, [factors[names[layer.offset]] for layer in sorted(layers)], out)
        return loss

    def _factors(self, params: FlatArray, indices: Indices) -> Mapping[str, tuple[FlatArray, FlatArray]]:
        x, y = self._data.train_x[indices], self._data.train_y[indices]
        return self.model.factors(self.schema.views(params), x, y)

    def evaluate(self, params: FlatArray, replicas: Sequence[int] = (0,)) -> Evaluation:
        views = self.schema.views(params)
        outputs = self.model.outputs(views, self._data.test_x)
        loss = self.model.loss(views, outputs, self._data.test_y)
        return Evaluation(loss, float(self._metric(outputs, self._data.test_y)))

    def distil(
        self, params: FlatArray, indices: Indices, out: FlatArray, targets: DistillationTargets, replica: int, step: int
    ) -> float:
        """Compute the gradient of the loss plus the weighted cross-entropy with the mean probabilities of the teachers;
        raise `CompositionError` if the model has no classes.
        """
        if not isinstance(self.model, SoftmaxRegression):
            raise CompositionError(
                f"{type(self.model).__name__} has no classes and cannot learn from the predictions of other models; "
                "use a classifier"
            )
        loss = self.gradient(params, indices, out, replica, step)
        x, own, views = self._data.train_x[indices], self.schema.views(params), self.schema.views(out)
        taught = np.exp(
            _mean_probabilities(np.stack([self.model.outputs(self.schema.views(w), x) for w in targets.teachers]))
        )
        error = (np.exp(_log_softmax(self.model.outputs(own, x))) - taught) * x.dtype.type(targets.weight / len(x))
        views["weight"] += x.T @ error
        views["bias"] += error.sum(axis=0)
        return loss

    def evaluate_together(self, members: FlatArray, replicas: Sequence[int]) -> Evaluation:
        x, y = self._data.test_x, self._data.test_y
        every = np.stack([self.model.outputs(self.schema.views(params), x) for params in members])
        outputs = every.mean(0) if not self.classes else _mean_probabilities(every)
        loss = self.model.loss(self.schema.views(members.mean(0)), outputs, y)
        return Evaluation(loss, float(self._metric(outputs, y)))

    def _rows(self, matrix: FlatArray) -> dict[str, FlatArray]:
        """Return name → view (R, *shape) of an (R, K) matrix."""
        return {
            e.name: matrix[:, e.offset : e.offset + e.size].reshape(len(matrix), *e.shape) for e in self.schema.entries
        }


def _mean_probabilities(logits: FlatArray) -> FlatArray:
    """Return the logarithm of the mean softmax over the first axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    mean: FlatArray = (np.exp(shifted) / np.exp(shifted).sum(axis=-1, keepdims=True)).mean(0)
    logarithms: FlatArray = np.log(np.maximum(mean, np.finfo(mean.dtype).tiny))
    return logarithms


def accuracy(outputs: FlatArray, targets: FlatArray) -> float:
    """Return the fraction of the samples whose largest output, on the last axis, is that of the target class."""
    return float(np.mean(outputs.argmax(axis=-1) == targets))


def cross_entropy(logits: FlatArray, y: FlatArray) -> float:
    """Return the mean of -log softmax(logits)[y] over N samples, for logits (N, classes) and classes y (N,)."""
    shifted, logarithms = _shifted(logits)
    return -float((np.take_along_axis(shifted, y[:, None], axis=1) - logarithms).mean(dtype=np.float64))


def cross_entropies(logits: FlatArray, y: FlatArray) -> tuple[FlatArray, FlatArray]:
    """Return the mean cross-entropies (R,) of R batches, and their gradients (softmax - onehot) / batch, for logits (R,
    batch, classes) and classes y (R, batch).
    """
    log_p = _log_softmax(logits)
    chosen = np.take_along_axis(log_p, y[..., None], axis=2)
    error = np.exp(log_p)
    np.put_along_axis(error, y[..., None], np.exp(chosen) - error.dtype.type(1), axis=2)
    error /= error.dtype.type(logits.shape[1])
    losses: FlatArray = -chosen[:, :, 0].mean(axis=1)
    return losses, error


def _log_softmax(logits: FlatArray) -> FlatArray:
    shifted, logarithms = _shifted(logits)
    shifted -= logarithms
    return shifted


def _shifted(logits: FlatArray) -> tuple[FlatArray, FlatArray]:
    """Return the logits minus their maximum over the last axis, and the logarithm of the sum of their exponentials.

    The maximum is computed class by class, which is many times faster for few classes.
    """
    top = np.ascontiguousarray(logits.reshape(-1, logits.shape[-1]).T).max(axis=0)
    shifted = logits - top.reshape(*logits.shape[:-1], 1)
    return shifted, np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def converted(data: Data, dtype: str) -> Data:
    """Return the data with integers as int64, and all other numbers in the model's dtype."""

    def convert(values: Any) -> Any:
        if isinstance(values, SampleColumn):
            return values.mapped(convert)
        array = np.asarray(values)
        return np.ascontiguousarray(array, np.int64 if array.dtype.kind in "iu" else dtype)

    tests = (np.asarray(values) for values in (data.test_x, data.test_y))  # an evaluation reads all of them at once
    return Data(convert(data.train_x), convert(data.train_y), *map(convert, tests))
