"""Parts shared by training loops that keep the parameters in one flat numpy array, copied from the script's
parameters.
"""

from __future__ import annotations

from flockstep.arrays.namespace import first_not_finite
from flockstep.arrays.schema import FlatArray, Schema
from flockstep.errors import ConfigurationError
from flockstep.optimizers.base import Optimizer
from flockstep.strategies.base import Strategy


class FiniteGuard:
    """Looks for NaN and infinity in the flat array of the parameters, which the script cannot change between steps."""

    def __init__(self, schema: Schema, params: FlatArray):
        self._schema, self._params, self._first = schema, params, -1

    def check(self) -> None:
        """Do nothing: the script holds only copies of the parameters, which need no check."""

    def require_own_steps(self) -> None:
        """Do nothing, because nothing else can step on the flat array."""

    def note(self) -> None:
        """Look for NaN and infinity in the flat array after a step."""
        self._first = first_not_finite(self._params)

    def not_finite(self) -> str | None:
        """Return the name of the first tensor that contained NaN or infinity at the last call of `note`; None if all
        values were finite.
        """
        if self._first < 0:
            return None
        return next(entry.name for entry in self._schema.entries if self._first < entry.offset + entry.size)


def require_elementwise(optimizer: Optimizer, strategy: Strategy) -> None:
    """Raise `ConfigurationError` if a server's optimizer step needs whole layers, which this loop cannot provide."""
    if strategy.traits.server_optimizer and not optimizer.elementwise:
        raise ConfigurationError(
            f"servers of {strategy} update slices of the parameters, got {optimizer}, which needs whole layers; use "
            "sgd or adam, or a strategy whose workers update the parameters, such as all_reduce"
        )
