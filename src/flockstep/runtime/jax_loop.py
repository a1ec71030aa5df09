"""`flockstep.jax.distribute`: a strategy updates the parameters of a JAX script's own training loop."""

from __future__ import annotations

import hashlib
import math
import sys
from types import TracebackType
from typing import Any

import jax
import numpy as np
import optax

from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError
from flockstep.frameworks.jax_optax import FlatOptax
from flockstep.frameworks.jax_tree import FlatTree, Tree
from flockstep.messages import Fields
from flockstep.nodes import Worker
from flockstep.optimizers.base import Optimizer
from flockstep.optimizers.sgd import SGD
from flockstep.runtime.flat_loop import FiniteGuard, require_elementwise
from flockstep.runtime.loop import Loop
from flockstep.runtime.plan import LocalOptimizer
from flockstep.strategies.base import Strategy


class Trainer:
    """One worker's part in a run that is driven by a JAX script's loop, as a context manager that finishes the run.

    The trainer keeps the parameters, as Flax's `TrainState` does: `step` and `finish` return them as new arrays, and a
    script that changes them in another way calls `sync`.
    """

    def __init__(self, params: Tree, optimizer: Any, strategy: Strategy, optimizer_state: Any = None):
        """Let `strategy` coordinate the run's workers; all of them start from rank 0's `params`."""
        nnx = sys.modules.get("flax.nnx")
        if nnx is not None and isinstance(params, nnx.Module):  # whose gradients are a tree of another structure
            raise ConfigurationError(
                f"the parameters must be a pytree of arrays, got the module {type(params).__name__}; pass "
                "nnx.state(module, nnx.Param), and put what step() returns into the module with nnx.update"
            )
        self._tree = FlatTree(params)
        schema = self._tree.schema
        self._flat = np.empty(schema.size, schema.dtype)
        self._tree.write(params, self._flat)
        self._stepper: OptaxStepper | LocalOptimizer
        if isinstance(optimizer, optax.GradientTransformation):
            if strategy.traits.server_optimizer:
                raise ConfigurationError(
                    f"servers of {strategy} update slices of the parameters with an optimizer of flockstep, got an "
                    'optax optimizer, whose settings cannot be read; pass an expression such as "adam(lr=0.001)", or '
                    "use a strategy whose workers update the parameters, such as all_reduce or local_sgd"
                )
            spec: Optimizer = SGD(lr=1.0)
            self._stepper = OptaxStepper(optimizer, self._tree, self._flat)
        elif isinstance(optimizer, (Optimizer, str)):
            spec = Optimizer.parse(optimizer)
            require_elementwise(spec, strategy)
            self._stepper = LocalOptimizer(spec, self._flat, schema.slices)
        else:
            raise ConfigurationError(
                f'the optimizer must be an optax.GradientTransformation or an expression such as "sgd(lr=0.1)", got '
                f"{type(optimizer).__name__}"
            )
        if optimizer_state is not None:
            self._load(optimizer_state)
        self.loop = Loop(self._flat, np.zeros_like(self._flat), schema, strategy, self._stepper, spec)
        self.loop.watch = FiniteGuard(schema, self._flat)
        if self.loop.workers > 1 and (strategy.traits.alike or strategy.traits.server_optimizer):
            if isinstance(self._stepper, OptaxStepper):
                rule = self._stepper.rule
            else:  # without the learning rate if each gradient brings its worker's own
                rule = str(spec.with_lr(1.0) if strategy.traits.own_rates else spec)
            self.loop.exchange("settings", lambda me: self._require_equal(me, rule))

    @property
    def params(self) -> Tree:
        """This worker's parameters as new arrays: rank 0's before the first step, the run's result after `finish`."""
        return self._tree.read(self._flat)

    @property
    def optimizer_state(self) -> Any:
        """State of the optax optimizer that runs on this worker; None if flockstep's own optimizer is used."""
        return self._stepper.state if isinstance(self._stepper, OptaxStepper) else None

    def record_loss(self, loss: Any) -> None:
        """Give the loss of the mini-batch of the next `step`, a number or a JAX scalar, to the record of the run.

        A loss that is not finite is treated as a gradient that is not finite.
        """
        self.loop.loss = float(loss)

    def record_metric(self, name: str, value: Any, *, higher_is_better: bool, count: float | None = None) -> None:
        """Give a value of a metric of the script's own evaluation to the record of the run, by which reports and
        comparisons rank runs.

        Without `count`, the value of rank 0 stands for the run, and calls on other ranks do nothing. With `count`, the
        run's value at a step is the mean over the ranks that have recorded this metric at this step, weighted by their
        counts. The arguments and errors are those of `DistributedOptimizer.record_metric`.
        """
        self.loop.record_metric(name, float(value), higher_is_better, count)

    def step(self, grads: Tree) -> Tree:
        """Pass the gradients of one mini-batch to the strategy; return the parameters for the next gradients.

        Args:
            grads: a tree like the parameters, from `jax.grad` of this worker's mean loss. Call this outside `jax.jit`.

        Raises:
            ConfigurationError: `grads` does not have the structure of the parameters, or the run has been finished.
            RunError: the run cannot continue.
        """
        self._tree.write(grads, self.loop.gradients, "the gradients")
        self.loop.step()
        return self.params

    def consensus(self) -> Tree:
        """Return the common model, equal on every rank, as `finish` would return it; every rank must call this.

        Raises:
            CompositionError: the strategy has no common model.
            ConfigurationError: the run has been finished.
        """
        return self._tree.read(self.loop.common())

    def sync(self, params: Tree) -> Tree:
        """Continue from parameters that the script has changed or loaded; call this on every rank, between two steps.

        All ranks and servers use the `params` of rank 0, which are returned, and the strategy restarts. Optimizers keep
        their state.
        """
        self._tree.write(params, self._flat)
        self.loop.restart(None)
        return self.params

    def finish(self) -> Tree:
        """End the run; return the resulting parameters, equal on every worker.

        Raises:
            RunError: the run cannot continue.
        """
        self.loop.finish()
        return self.params

    def _load(self, optimizer_state: Any) -> None:
        if not isinstance(self._stepper, OptaxStepper):
            raise ConfigurationError(
                "optimizer_state must be the state of an optax optimizer, but this optimizer belongs to flockstep; "
                "leave optimizer_state out"
            )
        found, own = map(jax.tree.structure, (optimizer_state, self._stepper.state))
        if found != own:
            raise ConfigurationError(
                f"optimizer_state must be {own}, as the optimizer's init() returns it, got {found}"
            )
        self._stepper.state = optimizer_state

    async def _require_equal(self, me: Worker, rule: str) -> None:
        """Raise `ConfigurationError` unless all ranks have the optimizer `rule`, and start with equal states of it."""
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(self.optimizer_state)]
        own: Fields = {"rule": rule, "digest": hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()}
        me.send_all(me.peers, "settings", None, own)
        for peer in me.peers:
            note = (await me.receive("settings", peer)).note
            if note["rule"] != rule:
                raise ConfigurationError(
                    f"all ranks of {self.loop.strategy} must have the same optimizer, got {rule} on rank {me.rank} and "
                    f"{note['rule']} on rank {peer}; give every rank the same optimizer, or use a strategy whose "
                    "workers step by themselves, such as local_sgd"
                )
            if note["digest"] != own["digest"]:
                raise ConfigurationError(
                    f"all replicas of {self.loop.strategy} must start with the same optimizer state, got different "
                    f"states on ranks {me.rank} and {peer}; load the same optimizer_state on every rank"
                )

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.loop.finish()


class OptaxStepper:
    """Updates a worker's parameters with an optax optimizer."""

    def __init__(self, optimizer: Any, tree: FlatTree, params: FlatArray):
        self.state: Any = None
        """State of the optax optimizer, a pytree."""
        self._optax = FlatOptax(optimizer, tree)
        self.reset(params)

    @property
    def lr(self) -> float:
        """Learning rate of the next step; NaN unless the optimizer was made with `optax.inject_hyperparams`."""
        if "learning_rate" not in getattr(self.state, "hyperparams", {}):
            return math.nan
        return float(self._optax.next_lr(self.state))

    @property
    def settings(self) -> tuple[str, list[dict[str, Any]]]:
        """Name of the optimizer, and the settings of each of its groups."""
        return "the optax optimizer", [{"lr": self.lr}]

    def step(self, params: FlatArray, gradient: FlatArray, in_place: bool = False) -> None:
        """Update `params` (K,) in place with `gradient` (K,)."""
        new, self.state = self._optax.stepped(params, gradient, self.state)
        params[:] = np.asarray(new)  # waits for the result: `gradient` may change afterwards

    @property
    def rule(self) -> str:
        """Text with a digest of the compiled step, equal for optimizers that XLA compiles to one computation."""
        return f"an optax optimizer whose step is {self._optax.digest(self.state)}"

    def reset(self, params: FlatArray) -> None:
        """Initialize the optimizer's state again, from the current parameters."""
        self.state = jax.block_until_ready(self._optax.init(params.copy()))
