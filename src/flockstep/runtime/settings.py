"""Changes of the optimizer's settings while a script trains; the workers send the changes to the servers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError
from flockstep.expression import to_text
from flockstep.messages import Message
from flockstep.nodes import Node, Server, Worker
from flockstep.optimizers.base import Optimizer

OPTIMIZER = "optimizer"
"""Tag of the message with new settings, which a server applies before its program receives the next message."""
FREE = 1 << 14
"""Number of bytes of settings for which messages have room anyway, also if each value takes four times as many."""


def room_for(settings: str) -> int:
    """Return the size of the largest message with settings that now have the given text; values may become longer."""
    return 4 * len(settings) if len(settings) > FREE else 0


def compared_at(step: int) -> bool:
    """Return whether workers tell the supervisor their settings for the step with the given number, from 1: each tenth
    of the first hundred steps, in which short runs end, then each hundredth.
    """
    return step % (10 if step < 100 else 100) == 0


def to_array(text: str) -> FlatArray:
    """Return a text as an array (uint8), for texts that may be longer than a note of a message."""
    return np.frombuffer(text.encode(), np.uint8)


def told(kind: str, groups: list[dict[str, Any]]) -> FlatArray:
    """Return the settings of each group of an optimizer of the class `kind` as the supervisor reads them."""
    return to_array(json.dumps([kind, groups]))


def tell_servers(me: Worker, optimizer: Optimizer) -> None:
    """Send new optimizer settings to the servers, and use them for the slice that this worker updates; they apply from
    the next step on.
    """
    me.optimizer = optimizer
    me.send_all(me.server_addresses, OPTIMIZER, to_array(to_text(optimizer)))


def taken_over(node: Node, message: Message) -> bool:
    """Apply the optimizer settings in `message`; return False if the message contains none.

    Raises:
        ConfigurationError: the new settings need another kind of optimizer state.
    """
    if message.tag != OPTIMIZER or not isinstance(node, Server):
        return False
    optimizer = Optimizer.parse(message.payload.tobytes().decode())
    if _remembered(optimizer, node) != _remembered(node.optimizer, node):
        raise ConfigurationError(
            "the settings of the optimizer may change during training only if its state stays of the same kind, got "
            f"{optimizer} after {node.optimizer}; choose these settings before flockstep.distribute"
        )
    node.optimizer = optimizer
    return True


def _remembered(optimizer: Optimizer, node: Server) -> set[str]:
    return set(optimizer.init(node.params[:1]).slots)
