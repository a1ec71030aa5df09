"""Creates the nodes of a run and their random streams, in the same way for every driver."""

from __future__ import annotations

from collections.abc import Callable

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


def make_worker(
    strategy: Strategy,
    cluster: Cluster,
    rank: int,
    params: FlatArray,
    schema: Schema,
    seed: int,
    stepper: Stepper,
    optimizer: Optimizer,
    steps: int | None = None,
    train_size: int = 0,
    samples: int = 0,
    layers: Callable[[], tuple[FactoredWeight, ...]] = tuple,
) -> Worker:
    """Create a worker whose live replica is `params` (K,).

    If `steps` is None, the worker trains as long as the user's loop runs. `optimizer` is the worker's optimizer in the
    form that servers use; `train_size` and `samples` are the numbers of training samples in total and in the worker's
    part; `layers` returns the layers whose gradients can be factored.
    """
    worker = Worker(rank, cluster, params, node_random(seed, rank), stepper, steps, optimizer, train_size)
    worker.schema, worker.samples, worker.find_layers = schema, samples, layers
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
