"""Creates the nodes of a run and their random streams, in the same way for every driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from flockstep.arrays.factors import FactoredWeight
from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray, Schema
from flockstep.messages import Address, server
from flockstep.nodes import Cluster, Server, Worker
from flockstep.optimizers.base import Optimizer
from flockstep.programs import Stepper
from flockstep.strategies.base import Strategy


def node_random(seed: int, address: Address) -> np.random.Generator:
    """Return the random generator of a node, which depends only on the seed and the node's address, not on the process
    of the node.
    """
    return np.random.default_rng(np.random.SeedSequence((seed, 0x5747, address + (1 << 31))))


class Stepping(NamedTuple):
    """How a worker's replica is updated: by its own optimizer, or by servers."""

    stepper: Stepper
    optimizer: Optimizer
    """The optimizer in the form that servers use."""


class DeclaredWork(NamedTuple):
    """What a declared job says of a worker's work; a script says nothing, except of a part of a replica."""

    steps: int | None = None
    """Number of steps; None: the worker trains as long as the user's loop runs."""
    train_size: int = 0
    """Number of training samples in total."""
    samples: int = 0
    """Number of training samples in the worker's part."""
    batch: int = 0
    """Number of samples of the worker's first gradient."""
    layers: Callable[[], tuple[FactoredWeight, ...]] = tuple
    """Returns the layers whose gradients can be factored."""
    fragments: Callable[[int], list[slice]] | None = None
    """See `Worker.fragments`; None if the worker's parameters are the whole model."""


def make_worker(
    strategy: Strategy,
    cluster: Cluster,
    rank: int,
    params: FlatArray,
    schema: Schema,
    seed: int,
    stepping: Stepping,
    work: DeclaredWork | None = None,
) -> Worker:
    """Create a worker whose live replica is `params` (K,)."""
    random, work = node_random(seed, rank), work or DeclaredWork()
    worker = Worker(rank, cluster, params, random, stepping.stepper, work.steps, stepping.optimizer, work.train_size)
    worker.schema, worker.find_layers = schema, work.layers
    worker.samples, worker.batch = work.samples, work.batch
    worker.fragments = worker.fragments if work.fragments is None else work.fragments
    worker.notes, worker.state = strategy.notes, strategy.worker_state(worker)
    return worker


def make_server(
    strategy: Strategy,
    cluster: Cluster,
    index: int,
    params: FlatArray,
    schema: Schema,
    seed: int,
    optimizer: Optimizer,
) -> Server:
    """Create server number `index` with a copy of the part of `params` (K,) that the server holds."""
    held = strategy.held(cluster.workers, len(params))[index]
    node = Server(index, cluster, copied(params[held]), node_random(seed, server(index)), optimizer)
    node.schema, node.held = schema, held
    node.optimizer_state.start = held.start
    node.notes, node.state = strategy.notes, strategy.master_state(node)
    return node
