"""flockstep for Keras 3: a callback by which a strategy coordinates `model.fit`, on the backends JAX and PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flockstep.errors import ConfigurationError, MissingDependency

try:
    import keras
except ModuleNotFoundError as error:
    if error.name in ("tensorflow", "jax", "torch"):
        raise ConfigurationError(
            f"Keras cannot load its backend {error.name}; set KERAS_BACKEND to jax or torch, whichever is installed"
        ) from error
    raise MissingDependency.of(str(error.name), "keras", "flockstep.keras") from error

from flockstep.arrays.schema import FlatArray, Schema
from flockstep.collectives.ring import Ring
from flockstep.nodes import Worker
from flockstep.optimizers.base import Optimizer
from flockstep.optimizers.sgd import SGD
from flockstep.runtime.flat_loop import FiniteGuard, require_elementwise
from flockstep.runtime.loop import Loop
from flockstep.runtime.node_spec import joining_run, strategy_of_run
from flockstep.runtime.payloads import receive_pieces, send_pieces
from flockstep.runtime.plan import LocalOptimizer
from flockstep.runtime.state import from_bytes, to_bytes
from flockstep.strategies.base import Strategy

__all__ = ["Flockstep"]


def _numbers(value: Any) -> FlatArray:
    """A variable or tensor of Keras as a numpy array."""
    array: FlatArray = keras.ops.convert_to_numpy(value)
    return array


def _packed(values: Sequence[Any]) -> FlatArray:
    """The values one after another, as a new array of float32."""
    return np.concatenate([np.empty(0, np.float32), *(np.ravel(_numbers(each)).astype(np.float32) for each in values)])


def _unpack(packed: FlatArray, variables: Sequence[Any]) -> None:
    """Assign to the variables what `_packed` has packed."""
    at = 0
    for each in variables:
        size = int(np.prod(each.shape))
        each.assign(packed[at : at + size].reshape(each.shape))
        at += size


async def _take_first(me: Worker, variables: Sequence[Any]) -> None:
    """Assign the values of the lowest rank to variables of any dtype."""
    root = min(me.rank, *me.peers)
    if me.rank == root:
        data = to_bytes([_numbers(each) for each in variables])
        send_pieces(me, me.peers, "memory", np.frombuffer(data, np.uint8))
        return
    for each, value in zip(variables, from_bytes((await receive_pieces(me, root, "memory")).tobytes()), strict=True):
        each.assign(value)


class _Weights:
    """The trainable variables of a model, and the flat array that holds this worker's replica of them."""

    def __init__(self, variables: Sequence[Any]):
        wrong = [each for each in variables if each.dtype != "float32"]
        if wrong or not variables:
            what = f"{wrong[0].path} of {wrong[0].dtype}" if wrong else "no trainable variable"
            raise ConfigurationError(
                f"flockstep.keras trains variables of float32, got {what}; use the policy float32 or mixed_bfloat16"
            )
        self.variables = list(variables)
        names = [f"{number}.{each.path}" for number, each in enumerate(variables)]
        self.schema = Schema.of({name: each.shape for name, each in zip(names, variables, strict=True)})
        self.flat = np.empty(self.schema.size, np.float32)

    def write(self, values: Sequence[Any], into: FlatArray) -> None:
        """Copy a value for each variable into a flat array; None counts as zero."""
        for part, value in zip(self.schema.views(into).values(), values, strict=True):
            part[...] = 0 if value is None else _numbers(value)

    def arrays(self, flat: FlatArray) -> list[Any]:
        """Return tensors of the backend with the values of a flat array, copied."""
        return [keras.ops.convert_to_tensor(part.copy()) for part in self.schema.views(flat).values()]

    def show(self, flat: FlatArray) -> None:
        """Assign the values of a flat array to the variables."""
        for variable, value in zip(self.variables, self.arrays(flat), strict=True):
            variable.assign(value)


class _KerasStepper:
    """The optimizer of a model as a worker's stepper. `state` are the values of the optimizer's variables."""

    def __init__(self, weights: _Weights, optimizer: Any, apply: Callable[[Any, Any, Any], tuple[Any, Any]]):
        """`apply`: computes new weights and a new state from state, gradients and weights."""
        self._weights, self._optimizer, self._apply = weights, optimizer, apply
        self.state = self._first = [keras.ops.copy(each.value) for each in optimizer.variables]

    @property
    def lr(self) -> float:
        """Learning rate of the next step; raises `ConfigurationError` if a schedule sets it, unknown here."""
        rate = self._optimizer._learning_rate
        for variable, value in zip(self._optimizer.variables, self.state, strict=True):
            if variable is rate:
                return float(_numbers(value))
        raise ConfigurationError(
            "the strategy needs the learning rate, got one of a LearningRateSchedule; pass a number, which a callback "
            "such as keras.callbacks.LearningRateScheduler may change"
        )

    @property
    def settings(self) -> tuple[str, list[dict[str, Any]]]:
        try:
            groups = [{"lr": self.lr}]
        except ConfigurationError:  # of a schedule, which counts the same steps on all workers
            groups = []
        return type(self._optimizer).__name__, groups

    def step(self, params: FlatArray, gradient: FlatArray, in_place: bool = False) -> None:
        """Update `params` (K,) in place with `gradient` (K,)."""
        arrays = self._weights.arrays
        new, self.state = self._apply(self.state, arrays(gradient), arrays(params))
        self._weights.write(new, params)

    def reset(self, params: FlatArray) -> None:
        """Set the optimizer's variables, except the learning rate, to their values before the first step."""
        rate = self._optimizer._learning_rate
        pairs = zip(self._optimizer.variables, self._first, self.state, strict=True)
        self.state = [now if variable is rate else first for variable, first, now in pairs]


class Flockstep(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that lets a strategy coordinate `model.fit`, in a script that `flockstep launch` starts.

    The callback must be the first in the list of callbacks. Every rank passes its part of the data to `fit`. From the
    validation or the end of an epoch until the next epoch, the model holds the common model, equal on every rank; after
    `fit`, it holds the result.
    """

    def __init__(self, strategy: str | Strategy, *, optimizer: str | Optimizer | None = None, timeout: float = 600.0):
        """Read the strategy; nothing starts before `fit`.

        Args:
            strategy: an expression such as "local_sgd(period=8)", or a strategy object.
            optimizer: an expression such as "adam(lr=0.001)", or an `Optimizer`, to step in place of the model's
                optimizer; needed if servers step.
            timeout: as in `flockstep.distribute`.

        Raises:
            ConfigurationError: the strategy or the optimizer is none, the strategy needs `optimizer`, or the backend
                is neither JAX nor PyTorch.
        """
        super().__init__()
        self._strategy = strategy_of_run(strategy)
        self._given = None if optimizer is None else Optimizer.parse(optimizer)
        self._timeout = timeout
        self._loop: Loop | None = None
        self._kept: FlatArray | None = None
        if keras.backend.backend() not in ("jax", "torch"):
            raise ConfigurationError(
                f"flockstep.keras needs Keras's backend jax or torch, got {keras.backend.backend()}; set KERAS_BACKEND"
            )
        if self._strategy.traits.server_optimizer and self._given is None:
            raise ConfigurationError(
                f"servers of {self._strategy} apply the updates with an optimizer of flockstep, not one of Keras; "
                'pass, for example, optimizer="adam(lr=0.001)", or use a strategy whose workers apply the updates, '
                "such as all_reduce or local_sgd"
            )
        if self._given is not None:
            require_elementwise(self._given, self._strategy)

    def on_train_begin(self, logs: Any = None) -> None:
        """Join the run; all workers start from rank 0's weights and optimizer state."""
        self._require_usable()
        model = self.model
        weights = self._weights = _Weights(model.trainable_variables)
        weights.write(weights.variables, weights.flat)
        jax = keras.backend.backend() == "jax"
        step = sys.modules["jax"].jit(model.optimizer.stateless_apply) if jax else self._apply_in_place()
        own = _KerasStepper(weights, model.optimizer, step)
        self._own = own if self._given is None else None
        stepper = own if self._given is None else LocalOptimizer(self._given, weights.flat, weights.schema.slices)
        with joining_run("keras.Flockstep", self._timeout):
            loop = self._loop = Loop(
                weights.flat,
                np.zeros_like(weights.flat),
                weights.schema,
                self._strategy,
                stepper,
                self._given or SGD(1.0),
            )
        loop.watch = FiniteGuard(weights.schema, weights.flat)
        weights.show(weights.flat)
        if loop.workers > 1:
            variables = [*model.optimizer.variables, *self._buffers]
            loop.exchange("memory", lambda me: _take_first(me, variables))
            own.state = own._first = [keras.ops.copy(each.value) for each in model.optimizer.variables]
        if jax:
            model.train_function = self._jax_step()
        else:
            object.__setattr__(model.optimizer, "apply", self._torch_step)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Put this rank's own replica back into the model at the start of an epoch."""
        if self._kept is not None:
            now = np.empty_like(self._weights.flat)
            self._weights.write(self._weights.variables, now)
            if not np.array_equal(now, self._shown, equal_nan=True):
                raise ConfigurationError(
                    "a callback has changed weights between two epochs, which the replicas of the ranks would not see; "
                    "change them before fit, which begins a run"
                )
            self._weights.show(self._weights.flat)
            _unpack(self._kept, self._buffers)
            self._kept = None

    def on_test_begin(self, logs: Any = None) -> None:
        """Set the model to the common model of all ranks for a validation within `fit`."""
        self._show()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Set the model to the common model of all ranks at the end of an epoch, for other callbacks."""
        self._show()

    def on_train_end(self, logs: Any = None) -> None:
        """End the run; afterwards, every rank's model holds the result."""
        loop = self._loop
        if loop is None:
            return
        buffers = _packed(self._buffers) if self._kept is not None else self._mean(_packed(self._buffers))
        loop.finish()
        self._weights.show(self._weights.flat)
        _unpack(buffers, self._buffers)
        self._loop = self._kept = None
        self.model.train_function = None
        vars(self.model.optimizer).pop("apply", None)

    @property
    def _buffers(self) -> list[Any]:
        """BatchNorm's statistics and other floating-point variables that are not trained."""
        return [each for each in self.model.non_trainable_variables if "float" in each.dtype]

    def _require_usable(self) -> None:
        """Raise `ConfigurationError` for what this callback would not see, or would do wrongly."""
        model, optimizer = self.model, self.model.optimizer
        jax = keras.backend.backend() == "jax"
        wrong = {
            "a LossScaleOptimizer": isinstance(optimizer, keras.optimizers.LossScaleOptimizer),
            "use_ema=True": bool(getattr(optimizer, "use_ema", False)),
            "steps_per_execution > 1": model.steps_per_execution > 1,
            "a keras.distribution": keras.distribution.distribution() is not None,
            "a custom train_step": jax and type(model).train_step is not keras.Model.train_step,
            "jit_compile=True on PyTorch": not jax and model.jit_compile is True,
        }
        found = [name for name, is_so in wrong.items() if is_so]
        if found:
            raise ConfigurationError(
                f"flockstep.keras cannot put a strategy between the gradients and the optimizer of a model with "
                f"{found[0]}; leave it out, or write the loop with flockstep.jax.distribute or flockstep.distribute"
            )

    def _mean(self, packed: FlatArray) -> FlatArray:
        """The mean of all ranks' arrays; every rank calls this."""
        loop = self._loop
        if loop is None or loop.workers == 1 or not packed.size:
            return packed

        async def program(me: Worker) -> None:
            size = self._weights.flat.size  # of the run's largest message
            for at in range(0, total.size, size):
                await Ring().all_reduce(me, total[at : at + size])

        total = packed.copy()
        loop.exchange("buffers", program)
        return total / np.float32(loop.workers)

    def _show(self) -> None:
        """Let the model hold the common model, once in an epoch."""
        if self._loop is None or self._kept is not None:
            return
        self._kept = _packed(self._buffers)
        self._shown = self._loop.common().copy()
        self._weights.show(self._shown)
        _unpack(self._mean(self._kept), self._buffers)

    def _exchange(self, gradients: Sequence[Any]) -> None:
        assert self._loop is not None
        self._weights.write(gradients, self._loop.gradients)
        self._loop.step()

    def _apply_in_place(self) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
        """The optimizer's step on PyTorch, whose variables are its state."""
        optimizer, variables = self.model.optimizer, self._weights.variables
        apply = type(optimizer).apply

        def step(state: Any, gradients: Any, values: Any) -> tuple[Any, Any]:
            for variable, value in zip(optimizer.variables, state, strict=True):
                variable.assign(value)
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
            apply(optimizer, gradients, variables)
            return variables, [each.value for each in optimizer.variables]

        return step

    def _torch_step(self, grads: Any, trainable_variables: Any = None) -> None:
        """Take the place of the optimizer's `apply`: the strategy's step."""
        if self._own is not None:
            self._own.state = [each.value for each in self.model.optimizer.variables]  # callbacks change them
        self._exchange(grads)
        self._weights.show(self._weights.flat)

    def _jax_step(self) -> Callable[[Any, Any], tuple[Any, Any]]:
        """The training function of the model: gradients, the strategy's step outside of `jax.jit`, metrics."""
        import jax

        model = self.model

        def gradients_of(state: Any, x: Any, y: Any, weight: Any) -> Any:
            trainable, others, memory, metrics = state
            compute = jax.value_and_grad(model.compute_loss_and_updates, has_aux=True)
            return compute(trainable, others, metrics, x, y, weight, training=True, optimizer_variables=memory)

        compiled, measured = jax.jit(gradients_of), jax.jit(model._update_metrics_variables)

        def train(state: Any, iterator: Any) -> tuple[Any, Any]:
            x, y, weight = keras.utils.unpack_x_y_sample_weight(next(iterator))
            (_, (loss, predicted, others, metrics)), gradients = compiled(state, x, y, weight)
            memory = state[2]
            if self._own is not None:
                self._own.state = memory
            self._exchange(gradients)
            logs, metrics = measured(metrics, loss, x, y, predicted, weight)
            after = memory if self._own is None else self._own.state
            return logs, (self._weights.arrays(self._weights.flat), others, after, metrics)

        return train
