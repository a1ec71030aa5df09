"""The state of a node that must survive a restart of its program, in virtual time and in a real process."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from flockstep.arrays.schema import FlatArray
from flockstep.messages import Address, Mailbox, Message
from flockstep.nodes import Node, Server, View
from flockstep.optimizers.base import OptimizerState
from flockstep.runtime.plan import Batches, LocalOptimizer
from flockstep.workloads.sampler import SamplerState


@dataclass(frozen=True)
class Saved:
    """The state of a node that must survive a restart: everything that its program may rely on between two steps."""

    params: FlatArray
    step: int
    state: Any
    random: dict[str, Any]
    optimizer: OptimizerState
    version: int
    batches: dict[int, tuple[SamplerState, int]]
    mailbox: Mailbox | None = None
    """Messages that have arrived and that no program has read yet; None after the end of a run, when all messages have
    been read.
    """
    sent: dict[Address, int] = field(default_factory=dict)
    gone: tuple[set[Address], ...] = ()
    """Three sets of addresses: the nodes that have died, the nodes that have died or left, and the nodes whose
    departure the program has been told of.
    """
    view: tuple[int, tuple[int, ...]] | None = None
    """Epoch and ranks of the workers that the node believes alive; None after the end of a run."""
    tasks: int = 0
    """Number of background tasks that the node has started."""
    taken: dict[str, list[Message]] = field(default_factory=dict)
    """Messages that background tasks had received; the tasks receive them again when the restarted program starts the
    tasks again.
    """

    def settle(self, node: Node) -> None:
        """Reset the node's counts of sent messages and its random generator, which the repeated start of background
        tasks has changed.
        """
        node.sent, node.started = self.sent, self.tasks
        node.random.bit_generator.state = self.random


def facts_of(node: Node, stepper: LocalOptimizer | None, batches: Batches | None) -> Saved:
    """Return the current state of a node without its messages; arrays are not copied. A server has no `stepper` and no
    `batches`.
    """
    optimizer = node.optimizer_state if isinstance(node, Server) else stepper.state if stepper else OptimizerState()
    return Saved(
        node.params,
        node.step,
        node.state,
        dict(node.random.bit_generator.state),
        optimizer,
        node.version if isinstance(node, Server) else 0,
        {} if batches is None else batches.state(),
    )


def restart_point(node: Node, stepper: LocalOptimizer | None, batches: Batches | None) -> Saved:
    """Return the current state of a node with its messages, from which its program can restart; arrays are not
    copied.
    """
    gone = node.lost, node.departed, node.reported_departures
    view = node.view.epoch, node.view.ranks
    facts = replace(facts_of(node, stepper, batches), mailbox=node.mailbox, sent=node.sent, gone=gone, view=view)
    return replace(facts, tasks=node.started, taken=node.taken)


def restore(node: Node, saved: Saved, stepper: LocalOptimizer | None) -> None:
    """Set a node's state to `saved`, which must belong to no other node; the caller restores the position in the
    data.
    """
    node.params[:] = saved.params
    node.step, node.state = saved.step, saved.state
    node.random.bit_generator.state = saved.random
    if isinstance(node, Server):
        node.optimizer_state, node.version = saved.optimizer, saved.version
    elif stepper is not None:
        stepper.state = saved.optimizer
    if saved.mailbox is not None:
        node.mailbox, node.sent = saved.mailbox, saved.sent.copy()
        node.lost, node.departed, node.reported_departures = saved.gone
        if saved.view is not None:
            node.view = View(*saved.view)
        for messages in saved.taken.values():
            node.mailbox.give_back(messages)
