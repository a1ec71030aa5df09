"""Checks of gradients and messages: a value that is not finite ends the run before it reaches other nodes."""

from __future__ import annotations

from flockstep.arrays.namespace import first_not_finite
from flockstep.arrays.schema import FlatArray, Schema
from flockstep.errors import Diverged
from flockstep.messages import Message, node_name
from flockstep.nodes import Node, Server


def require_finite_gradient(node: Node, gradient: FlatArray, start: int = 0, stop: int | None = None) -> None:
    """Check that the elements from `start` to `stop` of a worker's own gradient are finite.

    Raises:
        Diverged: an element is infinite or not a number.
    """
    where = first_not_finite(gradient[start:stop])
    if where >= 0:
        raise Diverged(
            f"the gradient of {node_name(node.address)} must be finite, got {float(gradient[start + where])} in "
            f"{_tensor(node.schema, start + where)} at step {node.run_step}; lower the learning rate, clip the "
            "gradient, or fix the samples or the loss"
        )


def require_finite_message(node: Node, message: Message) -> None:
    """Check that the array of a message that a server would apply is finite.

    Raises:
        Diverged: an element is infinite or not a number.
    """
    if isinstance(node, Server) and message.array is not None and getattr(message.array.dtype, "kind", "f") == "f":
        require_finite_update(node, message, message.array if message.array.ndim == 1 else message.array.reshape(-1))


def require_finite_update(node: Node, message: Message, update: FlatArray) -> None:
    """Check that a decoded update is finite.

    Raises:
        Diverged: an element is infinite or not a number.
    """
    where = first_not_finite(update)
    if where >= 0:
        raise Diverged(
            f"what {node_name(message.source)} sends to {node_name(node.address)} must be finite, got "
            f"{float(update[where])} at element {where} of its {message.tag!r} at step {node.before + message.step}; "
            "lower the learning rate or clip the gradient"
        )


def _tensor(schema: Schema | None, place: int) -> str:
    """Return the name of the tensor that contains an element of the flat gradient."""
    names = (
        entry.name for entry in (schema.entries if schema else ()) if entry.offset <= place < entry.offset + entry.size
    )
    return next((f"{name!r}" for name in names), f"element {place}")
