"""Rules for the states of nodes when a run continues with another number of workers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flockstep.arrays.namespace import namespace
from flockstep.arrays.schema import FlatArray
from flockstep.optimizers.base import OptimizerState


@dataclass(frozen=True)
class Resizing:
    """The rule by which the states of n workers are converted to the states of another number of workers.

    Before the rule applies, the programs of the n workers have ended as at the end of a run: nodes have sent every
    update that they held back, and every message has been used. A field of a state that the rule does not name is
    initialized as at the start of a run.
    """

    replicas: Literal["common", "own"] = "common"
    """Parameters with which workers continue. With `common`, all workers begin with the common model: the parameters of
    the servers, or the mean of the replicas. With `own`, a remaining worker keeps its replica, and a new worker begins
    with the common model; without servers, the remaining replicas move by the same vector, so that the mean of all
    replicas stays the common model.
    """
    own: tuple[str, ...] = ()
    """Names of the fields of a worker's state that a remaining worker keeps."""
    common: tuple[str, ...] = ()
    """Names of the fields of a worker's state that all workers take from worker 0."""
    server: tuple[str, ...] = ()
    """Names of the fields of a server's state that the server keeps."""
    also: str = ""
    """Clause for the documentation about further changes of the state when the number of workers changes; empty if
    there are none.
    """
    steps_at_end: bool = False
    """Whether workers may step with their own optimizers after their last gradient. The optimizer of a script steps in
    the script's process only, so that the number of a script's workers cannot change.
    """
    refused: str = ""
    """Reason why the number of workers cannot change, as the end of a sentence; empty if the number can change."""


@dataclass(frozen=True)
class FormerWorker:
    """A worker of a run before the number of workers changes, after its program has ended."""

    rank: int
    params: FlatArray
    """The worker's replica, of shape (K,)."""
    step: int
    state: Any
    """The state object of the worker's program."""
    optimizer: OptimizerState


def keep(state: Any, former: Any, names: Sequence[str]) -> None:
    """Copy the fields of the given names from a former state to a new state."""
    for name in names:
        setattr(state, name, copy.deepcopy(getattr(former, name)))


def take_slice(state: OptimizerState, part: slice, former: Sequence[OptimizerState]) -> None:
    """Fill the optimizer state of one slice of the model from the states of the former slices.

    `former` are the states of the consecutive slices of the whole model; `part` is the slice to which `state` belongs.
    """
    state.steps = max(one.steps for one in former)
    state.lr = former[0].lr
    for name in former[0].slots:
        whole = namespace(former[0].slots[name]).concatenate([one.slots[name] for one in former])
        state.slots[name] = copy.deepcopy(whole[part])
