"""A script's optimizer whose settings change while it trains: the workers tell the servers."""

from __future__ import annotations

from flockstep.errors import ConfigurationError
from flockstep.expression import to_text
from flockstep.messages import Message, server
from flockstep.nodes import Node, Server, Worker
from flockstep.optimizers.base import Optimizer

OPTIMIZER = "optimizer"
"""Tag of the message with the new settings, which a server takes over before its program sees the next message."""


def tell_servers(me: Worker, optimizer: Optimizer) -> None:
    """From the next step on, servers and the slices that this worker holds are stepped with other settings."""
    me.optimizer = optimizer
    me.send_all(map(server, range(me.cluster.servers)), OPTIMIZER, None, {"optimizer": to_text(optimizer)})


def taken_over(node: Node, message: Message) -> bool:
    """Whether `message` told of new settings, which the server now has.

    Raises:
        ConfigurationError: the optimizer would have to remember something else from now on.
    """
    if message.tag != OPTIMIZER or not isinstance(node, Server):
        return False
    optimizer = Optimizer.parse(str(message.note["optimizer"]))
    if _remembered(optimizer, node) != _remembered(node.optimizer, node):
        raise ConfigurationError(
            f"settings of the optimizer may change while it trains, but not what it remembers, got {optimizer} after "
            f"{node.optimizer}; set them before flockstep.distribute"
        )
    node.optimizer = optimizer
    return True


def _remembered(optimizer: Optimizer, node: Server) -> set[str]:
    return set(optimizer.init(node.params[:1]).slots)
