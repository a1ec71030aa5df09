"""All of a node between two steps: what a checkpoint, a node that joins, a replay and a changed run begin with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, ProtocolError
from flockstep.messages import Address, Mailbox, Message
from flockstep.nodes import Node, Server, View
from flockstep.optimizers.base import OptimizerState
from flockstep.records.checkpoints import Checkpoint
from flockstep.runtime.plan import Batches, LocalOptimizer
from flockstep.runtime.state import from_arrays, to_arrays
from flockstep.simulation.attacks import Memory
from flockstep.workloads.sampler import SamplerState

OF_SCRIPT = "script/"
"""Prefix of the names of the arrays that a script adds to the file with its worker's state."""


class Cut(msgspec.Struct, kw_only=True, eq=False):
    """The state of a node at a point where its program can restart.

    A cut without messages is an initial state, as when a run continues with another number of workers.
    """

    params: FlatArray
    step: int
    state: Any
    """The strategy's state."""
    random: dict[str, Any]
    optimizer: OptimizerState
    version: int = 0
    batches: dict[int, tuple[SamplerState, int]] = {}
    mailbox: Mailbox | None = None
    """Messages that have arrived and that no program has read yet; None after the end of a run, when all messages have
    been read.
    """
    sent: dict[Address, int] = {}
    gone: tuple[set[Address], ...] = ()
    """Three sets of addresses: the nodes that have died, the nodes that have died or left, and the nodes whose
    departure the program has been told of.
    """
    view: tuple[int, tuple[int, ...]] | None = None
    """Epoch and ranks of the workers that the node believes alive; None after the end of a run."""
    tasks: int = 0
    """Number of background tasks that the node has started."""
    taken: dict[str, list[Message]] = {}
    """Messages that background tasks had received; the tasks receive them again when the restarted program starts the
    tasks again.
    """
    before: int = 0
    """Number of steps that the run had taken when the node's program last started."""
    lr: float = 0.0
    loss: float = 0.0
    buffers: FlatArray = msgspec.field(default_factory=lambda: np.empty(0))
    totals: dict[str, int | float | list[int | float]] = {}
    """Totals of the node's metrics."""
    progress: tuple[dict[int, int], int, int] | None = None
    """Progress of the run as a server knows it: the number of steps of each worker, the sum of these numbers, and the
    number of the next tick of progress. None if the node does not count progress.
    """
    memories: list[Memory] = []
    """State that each injected fault of the worker's gradients keeps between two gradients."""
    strikes: Counter[Address] = msgspec.field(default_factory=Counter)
    """Number of refused gradients of each worker."""
    at_boundary: Any = None
    """State of the optimizer of a script's worker at the point where the worker's program stopped; None if there is no
    script.
    """
    script: Any = None
    """State that the script added at its next call of `flockstep.checkpoint`: what its framework keeps `between_steps`,
    and its values `extra`. None if there is no script, as in a declared job.
    """
    joins: bool = False
    """Whether the worker, or this process of its replica, joins the run with this checkpoint; its script then keeps its
    own random streams.
    """

    def restore(self, node: Node, stepper: LocalOptimizer | None) -> None:
        """Set a node's state to this cut, which must belong to no other node; the caller restores the position in the
        data.
        """
        node.params[:] = self.params
        node.step, node.state, node.before = self.step, self.state, self.before
        node.random.bit_generator.state = self.random
        if isinstance(node, Server):
            node.optimizer_state, node.version = self.optimizer, self.version
        elif stepper is not None:
            stepper.state = self.optimizer
        if self.mailbox is not None:
            node.mailbox, node.sent = self.mailbox, self.sent.copy()
            node.lost, node.departed, node.reported_departures = self.gone
            if self.view is not None:
                node.view = View(*self.view)
            for messages in self.taken.values():
                node.mailbox.give_back(messages)

    def settle(self, node: Node) -> None:
        """Reset the node's counts of sent messages and its random generator, which the repeated start of background
        tasks has changed.
        """
        node.sent, node.started = self.sent, self.tasks
        node.random.bit_generator.state = self.random

    def to_arrays(self) -> dict[str, FlatArray]:
        """Return the cut as named arrays; its script's state must be a dict of arrays, or None."""
        added = {OF_SCRIPT + name: array for name, array in (self.script or {}).items()}
        return {**to_arrays(msgspec.structs.replace(self, script=None)), **added}


def cut_of(node: Node, stepper: LocalOptimizer | None, batches: Batches | None, messages: bool = True) -> Cut:
    """Return the current state of a node; arrays are not copied. A server has no `stepper` and no `batches`.

    With its `messages`, the node's program can restart from the cut.
    """
    optimizer = node.optimizer_state if isinstance(node, Server) else stepper.state if stepper else OptimizerState()
    cut = Cut(
        params=node.params,
        step=node.step,
        state=node.state,
        random=dict(node.random.bit_generator.state),
        optimizer=optimizer,
        version=node.version if isinstance(node, Server) else 0,
        batches={} if batches is None else batches.state(),
    )
    if messages:
        cut.mailbox, cut.sent, cut.tasks, cut.taken = node.mailbox, node.sent, node.started, node.taken
        cut.gone = node.lost, node.departed, node.reported_departures
        cut.view = node.view.epoch, node.view.ranks
    return cut


def read_cut(checkpoint: Checkpoint, address: Address, script: bool = True) -> Cut:
    """Return the state of a node from a checkpoint.

    Without `script`, the state that a script added stays encoded, as a dict of arrays, because only the script knows
    the data classes of this state.

    Raises:
        ConfigurationError: the checkpoint is damaged.
    """
    folder = checkpoint.folder
    arrays = checkpoint.arrays(address)
    added = {name.removeprefix(OF_SCRIPT): one for name, one in arrays.items() if name.startswith(OF_SCRIPT)}
    try:
        cut = from_arrays(arrays, FORMER)
        added_state = from_arrays(added, FORMER) if added and script else added or None
    except ProtocolError as error:
        raise ConfigurationError(
            f"{folder}: {error}; delete this folder to resume from the previous checkpoint"
        ) from None
    if not isinstance(cut, Cut):
        raise ConfigurationError(
            f"{folder} does not hold the state of a node; delete this folder to resume from the previous checkpoint"
        )
    cut.script = added_state
    return cut


def _joined(fields: dict[str, Any]) -> Cut:
    return Cut(**fields.pop("saved"), **fields)


FORMER: Mapping[str, Any] = {
    "flockstep.runtime.node_state.Saved": dict,
    "flockstep.runtime.checkpoints.NodeCheckpoint": _joined,
    "flockstep.runtime.script_checkpoints.ScriptState": dict,
}
"""Class in checkpoints of earlier versions → function that makes today's value from its fields."""
