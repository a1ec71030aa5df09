"""Changes of the optimizer's settings while a script trains; the workers send the changes to the servers."""

from __future__ import annotations

from flockstep.errors import ConfigurationError
from flockstep.expression import to_text
from flockstep.messages import Message
from flockstep.nodes import Node, Server, Worker
from flockstep.optimizers.base import Optimizer

OPTIMIZER = "optimizer"
"""Tag of the message with new settings, which a server applies before its program receives the next message."""


def tell_servers(me: Worker, optimizer: Optimizer) -> None:
    """Send new optimizer settings to the servers, and use them for the slice that this worker updates; they apply from
    the next step on.
    """
    me.optimizer = optimizer
    me.send_all(me.server_addresses, OPTIMIZER, None, {"optimizer": to_text(optimizer)})


def taken_over(node: Node, message: Message) -> bool:
    """Apply the optimizer settings in `message`; return False if the message contains none.

    Raises:
        ConfigurationError: the new settings need another kind of optimizer state.
    """
    if message.tag != OPTIMIZER or not isinstance(node, Server):
        return False
    optimizer = Optimizer.parse(str(message.note["optimizer"]))
    if _remembered(optimizer, node) != _remembered(node.optimizer, node):
        raise ConfigurationError(
            "the settings of the optimizer may change during training only if its state stays of the same kind, got "
            f"{optimizer} after {node.optimizer}; choose these settings before flockstep.distribute"
        )
    node.optimizer = optimizer
    return True


def _remembered(optimizer: Optimizer, node: Server) -> set[str]:
    return set(optimizer.init(node.params[:1]).slots)
