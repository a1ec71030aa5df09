"""Runs optimizers of the library optax on the flat array of a pytree's parameters."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError
from flockstep.frameworks.jax_tree import FlatTree
from flockstep.optimizers.base import Optimizer, OptimizerState
from flockstep.optimizers.sgd import SGD


class FlatOptax:
    """An optax optimizer that is compiled for a flat array (K,) instead of a tree. Its state is optax's pytree."""

    def __init__(self, optimizer: Any, tree: FlatTree):
        def stepped(params: Any, gradient: Any, state: Any) -> tuple[Any, Any]:
            before = tree.unflatten(params, narrow=False)
            updates, state = optimizer.update(tree.unflatten(gradient, narrow=False), state, before)
            return tree.flatten(optax.apply_updates(before, updates)), state

        def next_lr(state: Any) -> Any:
            """The state holds the rate of the last step; a step from there, of which only the rate is computed, has the
            next one.
            """
            nothing = jnp.zeros(tree.schema.size, tree.schema.dtype)
            return stepped(nothing, nothing, state)[1].hyperparams["learning_rate"]

        self._size, self._dtype = tree.schema.size, tree.schema.dtype
        self.init = jax.jit(lambda params: optimizer.init(tree.unflatten(params, narrow=False)))
        self.stepped = jax.jit(stepped)
        self.next_lr = jax.jit(next_lr)

    def digest(self, state: Any) -> str:
        """Return 16 hexadecimal digits of a hash of the step in StableHLO: the computation and all its constants."""
        array = jax.ShapeDtypeStruct((self._size,), self._dtype)
        return hashlib.sha256(self.stepped.lower(array, array, state).as_text().encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class OptaxOptimizer(Optimizer):
    """The optax optimizer of a job. Only workers can run the optimizer, because its settings cannot be read.

    `lr` is the learning rate of `optax.inject_hyperparams(…)(learning_rate=0.1)`, which schedules of flockstep and
    `--lr` may change, and NaN for other optimizers, whose rates only optax knows. The state holds the leaves of optax's
    state as numpy arrays.
    """

    elementwise: ClassVar[bool] = False
    flat: FlatOptax
    structure: Any
    """Tree structure of the optax optimizer's state."""
    lr: float = math.nan

    @classmethod
    def of(cls, optimizer: Any, tree: FlatTree, params: FlatArray) -> OptaxOptimizer:
        """Return the optimizer for the parameters (K,) of `tree`; raise `ConfigurationError` for random keys."""
        flat = FlatOptax(optimizer, tree)
        state = flat.init(params.copy())
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                raise ConfigurationError(
                    f"the state of an optax optimizer must hold numbers, got a random key at "
                    f"{jax.tree_util.keystr(path)}; use the older keys of jax.random.PRNGKey, which are numbers"
                )
        told = "learning_rate" in getattr(state, "hyperparams", {}) and "learning_rate" not in getattr(
            state, "hyperparams_states", {}
        )
        lr = float(state.hyperparams["learning_rate"]) if told else math.nan
        return cls(flat, jax.tree.structure(state), lr)

    def __str__(self) -> str:
        return "an optax optimizer"

    @property
    def on_servers(self) -> Optimizer:
        """Return None, because under strategies whose workers step, servers need no optimizer."""
        return SGD(lr=1.0)

    def with_lr(self, lr: float) -> Optimizer:
        """Return this optimizer with another learning rate, if the optax optimizer allows the rate to be set."""
        if math.isnan(self.lr):
            raise ConfigurationError(
                f"the learning rate {lr:g} cannot be set, because only optax knows the learning rate of this "
                f"optimizer; use for example optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), or the expression "
                '"sgd(lr=0.1)"'
            )
        return replace(self, lr=lr)

    def init(self, params: FlatArray) -> OptimizerState:
        """Return the initial state of the optax optimizer, as a list of arrays."""
        return OptimizerState(foreign=_leaves(self.flat.init(params.copy())))

    def step(
        self, params: FlatArray, gradient: FlatArray, state: OptimizerState, lr: float, share: float = 1.0
    ) -> None:
        assert share == 1, "an optax optimizer takes whole steps; only optimizers on servers take shares of a step"
        own = jax.tree.unflatten(self.structure, state.foreign)
        if not math.isnan(self.lr):
            own.hyperparams["learning_rate"] = np.asarray(lr, own.hyperparams["learning_rate"].dtype)
        new, own = self.flat.stepped(params, gradient, own)
        params[:] = np.asarray(new)  # waits for the result: `gradient` may change afterwards
        state.steps, state.foreign = state.steps + share, _leaves(own)


def _leaves(tree: Any) -> list[FlatArray]:
    """Copies of the leaves, which compiled functions do not change."""
    return [np.array(leaf) for leaf in jax.tree.leaves(tree)]
