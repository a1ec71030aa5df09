"""flockstep for JAX: a strategy for a script's own loop over a pytree of parameters, and models for jobs."""

from __future__ import annotations

from typing import Any

from flockstep.errors import MissingDependency

try:
    import jax as _jax  # noqa: F401 - the error names what to install
    import optax as _optax  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingDependency.of(str(error.name), "jax", "flockstep.jax") from error

from flockstep.frameworks.jax import JaxModel
from flockstep.runtime.jax_loop import Trainer
from flockstep.runtime.node_spec import joining_run, strategy_of_run
from flockstep.strategies.base import Strategy

__all__ = ["JaxModel", "Trainer", "distribute"]


def distribute(
    params: Any,
    optimizer: Any,
    strategy: str | Strategy | None = None,
    *,
    optimizer_state: Any = None,
    timeout: float = 600.0,
) -> Trainer:
    """Let `strategy` coordinate the workers that `flockstep launch` started; without it, one worker trains alone.

    All workers start from rank 0's parameters, `trainer.params`. Call `trainer.step(grads)` with the gradients of each
    mini-batch, outside `jax.jit`, and `trainer.finish()` when training is over; both return parameters.

    Args:
        params: a pytree of floating-point arrays, such as a dict or `nnx.state(model, nnx.Param)`, of equal structure
            on every worker.
        optimizer: an optax optimizer, if the strategy's workers run the optimizer; an expression such as
            "adam(lr=0.001)", or an `Optimizer`, under every strategy.
        strategy: an expression such as "local_sgd(period=8)", or a strategy object; there is no default.
        optimizer_state: an earlier `trainer.optimizer_state` to continue from; None for a fresh state.
        timeout: seconds within which all processes that torchrun, mpirun or srun started must have called `distribute`,
            as in `flockstep.distribute`.

    Raises:
        ConfigurationError: the parameters, the optimizer or the strategy cannot be used, or differ between workers, or
            the script of a launched run has started this process.
    """
    with joining_run("jax.distribute", timeout):
        return Trainer(params, optimizer, strategy_of_run(strategy), optimizer_state)
