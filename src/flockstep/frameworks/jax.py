"""Gradients of JAX functions, for one replica at a time, or for many replicas in one call under `jax.vmap`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from flockstep.arrays.schema import FlatArray, slices
from flockstep.errors import ConfigurationError, MissingDependency, in_short
from flockstep.frameworks.base import Data, DistillationTargets, Evaluation, Indices, Job
from flockstep.frameworks.jax_tree import FlatTree, Tree
from flockstep.frameworks.numpy import ArrayEngine, converted
from flockstep.frameworks.streams import SampleColumn
from flockstep.optimizers.base import Optimizer

LARGEST_CHUNK = 64
"""Maximum number of replicas in one batched call."""


@dataclass(frozen=True, eq=False)
class JaxModel:
    """A JAX model as two functions, for `Job(model=…)`.

    Args:
        init: function (key) → the parameters with which every replica starts, a pytree of floating-point arrays.
        apply: function (params, x) → the outputs for the samples x, first axis over samples.
        random: whether `apply` draws random numbers in training; `apply(params, x, key)` is then called with a key
            that differs for each gradient, and with `key=None` in evaluations.
    """

    init: Callable[[jax.Array], Tree]
    apply: Callable[..., jax.Array]
    random: bool = False

    @classmethod
    def from_nnx(cls, build: Callable[[Any], Any]) -> JaxModel:
        """Return the model of a Flax NNX module whose whole state is parameters.

        Args:
            build: function (rngs: nnx.Rngs) → the module, such as `lambda rngs: nnx.Linear(4, 3, rngs=rngs)`.

        Raises:
            MissingDependency: Flax is not installed.
            ConfigurationError: `build` returns no module, or the module has other state, such as batch statistics.
        """
        try:
            from flax import nnx
        except ModuleNotFoundError as error:
            raise MissingDependency(f"JaxModel.from_nnx needs {error.name}, part of Flax; pip install flax") from error

        def built(rngs: Any) -> Any:
            module = build(rngs)
            if not isinstance(module, nnx.Module):
                raise ConfigurationError(
                    f"from_nnx needs a function that returns an nnx.Module, got one that returns a value of type "
                    f"{type(module).__name__}; pass lambda rngs: the module"
                )
            return module

        graph, _, others = nnx.split(nnx.eval_shape(lambda: built(nnx.Rngs(0))), nnx.Param, ...)
        for path, variable in nnx.to_flat_state(others):
            raise ConfigurationError(
                f"every variable of the module must be an nnx.Param, got {'.'.join(map(str, path))} of type "
                f"{type(variable).__name__}: a job keeps no batch statistics or random streams; leave the layer out, "
                "or train in a loop with flockstep.jax.distribute"
            )
        return cls(
            lambda key: nnx.state(built(nnx.Rngs(key)), nnx.Param), lambda params, x: nnx.merge(graph, params)(x)
        )


class JaxEngine(ArrayEngine):
    """The engine of a job whose model is a `JaxModel`; gradients are computed by `jax.value_and_grad` under `jax.jit`.

    The number of replicas in a batched call is rounded up to a power of two, so that few functions are compiled. A
    gradient from a batched call agrees with the gradient from a single call up to rounding.
    """

    def __init__(self, job: Job, seed: int, model: JaxModel | None = None):
        """Build the job's model (unless `model` is given) and load its data; `seed` is for the initial parameters.
        Raise `ConfigurationError` if model, loss, data and optimizer do not fit together.
        """
        built = job.model() if model is None else model
        if not isinstance(built, JaxModel):
            raise ConfigurationError(f"a JAX engine needs a flockstep.jax.JaxModel, got {type(built).__name__}")
        if job.loss is None:
            raise ConfigurationError(
                f"the job {job.name!r} needs a loss for its JAX model; pass loss=a function (outputs, targets) → scalar"
            )
        self._model, self._loss, self._seed = built, job.loss, seed
        start = built.init(jax.random.key(seed % 2**63))
        self._tree = FlatTree(start)
        self.schema = self._tree.schema
        self._start = np.empty(self.schema.size, self.schema.dtype)
        self._tree.write(start, self._start)
        self.optimizer = _optimizer_of(job, self._tree, self._start)
        data = converted(job.data(), self.schema.dtype)
        self._use(job, Data(**{name: _kept(name, values) for name, values in vars(data).items()}))
        self._one = jax.jit(self._value_and_gradient)
        self._many = jax.jit(jax.vmap(self._value_and_gradient))
        self._evaluated_loss = jax.jit(job.loss)
        self._outputs = jax.jit(lambda params, x: self._call(self._tree.unflatten(params), x, None))
        self._probe(job)

    def operations(self, batch: int) -> float | None:
        """Return the floating-point operations of a gradient, as XLA counts them before its optimizations; None for a
        sealed job, in whose programs XLA knows no shapes before.
        """
        x, y = (values[np.arange(batch) % self.train_size] for values in (self._data.train_x, self._data.train_y))
        lowered = self._one.lower(self._start, x, y, np.zeros(2, np.uint32), None, 0.0)
        try:
            return (lowered.cost_analysis() or {}).get("flops")
        except jax.errors.JaxRuntimeError:
            return None

    def gradient(self, params: FlatArray, indices: Indices, out: FlatArray, replica: int = 0, step: int = 0) -> float:
        none = DistillationTargets(params[None, :][:0], 0.0)
        return self.distil(params, indices, out, none, replica, step)

    def gradients(
        self, params: FlatArray, indices: Indices, out: FlatArray, replicas: Sequence[int], steps: Sequence[int]
    ) -> npt.NDArray[np.float64]:
        losses = np.empty(len(params), np.float64)
        keys = self._keys(replicas, steps)
        for part in slices(len(params), -(-len(params) // LARGEST_CHUNK)):
            count = part.stop - part.start
            whole = 1 << (count - 1).bit_length()  # the smallest power of two that is at least `count`
            rows = np.minimum(np.arange(part.start, part.start + whole), part.stop - 1)
            chosen = indices[rows]
            x, y = self._data.train_x[chosen], self._data.train_y[chosen]
            values, slopes = self._many(params[rows], x, y, keys[rows])
            losses[part], out[part] = np.asarray(values)[:count], np.asarray(slopes)[:count]
        return losses

    def distil(
        self, params: FlatArray, indices: Indices, out: FlatArray, targets: DistillationTargets, replica: int, step: int
    ) -> float:
        x, y, keys = self._data.train_x[indices], self._data.train_y[indices], self._keys([replica], [step])
        taught = self._mean_outputs(targets.teachers, x) if len(targets.teachers) else None
        loss, slope = self._one(params, x, y, keys[0], taught, targets.weight)
        out[:] = np.asarray(slope)
        return float(loss)

    def evaluate(self, params: FlatArray, replicas: Sequence[int] = (0,)) -> Evaluation:
        return self.evaluate_together(params[None], replicas)

    def evaluate_together(self, members: FlatArray, replicas: Sequence[int]) -> Evaluation:
        outputs, y = self._mean_outputs(members, self._data.test_x), self._data.test_y
        return Evaluation(float(self._evaluated_loss(outputs, y)), float(self._metric(outputs, y)))

    def _call(self, tree: Tree, x: Any, key: Any) -> Any:
        return self._model.apply(tree, x, key) if self._model.random else self._model.apply(tree, x)

    def _value_and_gradient(
        self, params: Any, x: Any, y: Any, key: Any, taught: Any = None, weight: float = 0.0
    ) -> tuple[Any, Any]:
        """Return the mean loss, and the gradient (K,) of the loss plus the weighted distance to outputs `taught`."""

        def total(tree: Tree) -> tuple[Any, Any]:
            outputs = self._call(tree, x, jax.random.wrap_key_data(key))
            loss = self._loss(outputs, y)
            if jnp.shape(loss):
                raise ConfigurationError(
                    f"the loss must be a scalar, the mean over a batch, got shape {loss.shape}; use .mean()"
                )
            return (loss if taught is None else loss + weight * self._distance(outputs, taught)), loss

        (_, loss), slopes = jax.value_and_grad(total, has_aux=True)(self._tree.unflatten(params))
        return loss, self._tree.flatten(slopes)

    def _distance(self, outputs: Any, taught: Any) -> Any:
        """Return the distance to what `_mean_outputs` returned: cross-entropy, or mean squared difference."""
        if not self.classes:
            return jnp.mean((outputs - taught) ** 2)
        return -(jax.nn.softmax(taught) * jax.nn.log_softmax(outputs)).sum(-1).mean()

    def _mean_outputs(self, members: FlatArray, x: FlatArray) -> FlatArray:
        """Return the mean outputs of the models `members` (M, K); with classes, the log of mean probabilities."""
        outputs = [self._outputs(params, x) for params in members]
        if len(outputs) == 1:
            mean = outputs[0]
        elif not self.classes:
            mean = jnp.stack(outputs).mean(0)
        else:
            mean = jax.nn.logsumexp(jax.nn.log_softmax(jnp.stack(outputs)), 0) - np.log(len(outputs))
        return np.asarray(mean)

    def _keys(self, replicas: Sequence[int], steps: Sequence[int]) -> npt.NDArray[np.uint32]:
        """Return the data (R, 2) of a random key for each gradient, independent of where the gradient is computed."""
        if not self._model.random:
            return np.zeros((len(replicas), 2), np.uint32)
        seeds = ([self._seed % 2**64, replica, step] for replica, step in zip(replicas, steps, strict=True))
        return np.stack([np.random.SeedSequence(words).generate_state(2) for words in seeds])

    def _probe(self, job: Job) -> None:
        """Trace one gradient and one evaluation, to find out whether the job works."""
        x, y = (values[: min(job.batch, self.train_size)] for values in (self._data.train_x, self._data.train_y))
        try:
            jax.eval_shape(self._value_and_gradient, self._start, x, y, np.zeros(2, np.uint32))
            jax.eval_shape(self._outputs, self._start, self._data.test_x)
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"the job {job.name!r} must work on its first batch, got {in_short(error)}; fix its model, loss or data"
            ) from error


def _optimizer_of(job: Job, tree: FlatTree, start: FlatArray) -> Optimizer:
    """The job's optimizer for the parameters `start` (K,) of `tree`."""
    given = job.optimizer
    if isinstance(given, (Optimizer, str)):
        return Optimizer.parse(given)
    optax = sys.modules.get("optax")
    if optax is None or not isinstance(given, optax.GradientTransformation):
        raise ConfigurationError(
            f"the optimizer of a JAX job must be an optax.GradientTransformation or an expression such as "
            f'"adam(lr=0.001)", got one of type {type(given).__name__}; pass one of these'
        )
    from flockstep.frameworks.jax_optax import OptaxOptimizer

    return OptaxOptimizer.of(given, tree, start)


def _kept(name: str, values: Any) -> Any:
    """The values, without integers that JAX would cut off to 32 bits; a column is checked batch by batch."""
    if isinstance(values, SampleColumn):
        return values.mapped(lambda batch: _kept(name, batch))
    if values.dtype == np.int64 and not jax.config.read("jax_enable_x64") and np.abs(values).max() >= 1 << 31:
        raise ConfigurationError(
            f"{name} has integers beyond 32 bits, which JAX would cut off; call "
            'jax.config.update("jax_enable_x64", True), or use smaller numbers'
        )
    return values
