"""Checks of gradients and messages, which refuse values that are too large or not finite before the values reach other
nodes.
"""

from __future__ import annotations

import math

from flockstep.arrays.namespace import first_not_finite, namespace, zeros
from flockstep.arrays.schema import FlatArray, Schema
from flockstep.errors import CompositionError, Diverged
from flockstep.messages import Message, node_name
from flockstep.nodes import BadGradients, Node
from flockstep.strategies.base import Strategy


def bad_gradient(
    node: Node,
    gradient: FlatArray,
    start: int = 0,
    stop: int | None = None,
    packed: bool = False,
    known: bool = False,
) -> str | None:
    """Return the reason why elements `start` to `stop` of a worker's own gradient are refused; None if the elements are
    accepted.

    `packed` says that the array holds factors, whose norm is not the norm of the gradient, and `known` that all
    elements are known to be finite.
    """
    part, most = gradient[start:stop], None if packed else node.bad_gradients.max_norm
    if most is not None and norm_of(part) <= most:  # every element is finite, too
        return None
    where = -1 if known else first_not_finite(part)
    if where >= 0:
        return (
            f"the gradient of {node_name(node.address)} must be finite, got {float(gradient[start + where])} in "
            f"{_tensor(node.schema, start + where)} at step {node.run_step}; lower the learning rate, clip the "
            "gradient, or fix the samples or the loss"
        )
    return None if most is None else _too_large(part, most, f"the gradient of {node_name(node.address)}", node.run_step)


def require_finite_message(node: Node, message: Message, array: FlatArray) -> None:
    """Check that `array`, which a server would apply, is finite.

    Raises:
        Diverged: an element is infinite or not a number.
    """
    if getattr(array.dtype, "kind", "f") == "f":
        update = array if array.ndim == 1 else array.reshape(-1)
        where = first_not_finite(update)
        if where >= 0:
            raise Diverged(_not_finite(node, message, update, where))


def accepted(node: Node, message: Message, gradient: FlatArray) -> FlatArray:
    """Return the gradient that a worker has sent, or zeros in its place if the gradient is too large or not finite.

    Raises:
        Diverged: the gradient is refused, and the settings say that a bad gradient ends the run.
    """
    most = node.bad_gradients.max_norm
    if most is not None and norm_of(gradient) <= most:  # every element is finite, too
        return gradient
    where = first_not_finite(gradient)
    if where >= 0:
        reason = _not_finite(node, message, gradient, where)
    elif most is not None:
        what = f"the gradient that {node_name(message.source)} sends to {node_name(node.address)}"
        reason = _too_large(gradient, most, what, node.before + message.step)
    else:
        return gradient
    node.refuse(message.source, reason)
    return zeros(gradient, len(gradient))


def _not_finite(node: Node, message: Message, update: FlatArray, where: int) -> str:
    return (
        f"an update from {node_name(message.source)} to {node_name(node.address)} must be finite, got "
        f"{float(update[where])} at element {where} of message {message.tag!r} at step {node.before + message.step}; "
        "lower the learning rate or clip the gradient"
    )


def _too_large(gradient: FlatArray, most: float, what: str, step: int) -> str:
    return (
        f"{what} must have a norm <= {most:g}, got {norm_of(gradient):.4g} at step {step}; "
        "raise max_gradient_norm if such norms are usual"
    )


def norm_of(gradient: FlatArray) -> float:
    """Return the Euclidean norm of a finite array; infinity if the sum of squares overflows."""
    return math.sqrt(float(namespace(gradient).vdot(gradient, gradient)))


def _tensor(schema: Schema | None, place: int) -> str:
    """Return the name of the tensor that contains an element of the flat gradient."""
    names = (
        entry.name for entry in (schema.entries if schema else ()) if entry.offset <= place < entry.offset + entry.size
    )
    return next((f"{name!r}" for name in names), f"element {place}")


def require_skippable(strategy: Strategy, bad_gradients: BadGradients, workers: int) -> None:
    """Raise `CompositionError` if the strategy cannot continue with zeros in place of a bad gradient, or without a
    worker in quarantine.
    """
    if bad_gradients.action != "stop" and strategy.traits.curvature:
        raise CompositionError(
            f"{strategy} searches with the losses and gradients of all workers, of which none may be left out; use "
            "on_bad_gradient=stop"
        )
    if bad_gradients.action == "quarantine" and not strategy.traits.deaths(workers):
        raise CompositionError(
            f"quarantine removes a worker, but {strategy} on {workers} workers does not continue after the loss of a "
            "worker; use on_bad_gradient=skip, or a strategy that survives a lost worker, such as ps(consistency=ssp) "
            "or gossip"
        )
