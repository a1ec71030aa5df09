"""Runs on Ray: an actor on each node of a placement group is the agent of that node, and the driver coordinates."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from flockstep.errors import ConfigurationError
from flockstep.launchers.meeting import TIMEOUT, Meeting
from flockstep.launchers.output import SHOWN, Output
from flockstep.launchers.tasks import TaskGathering, TaskSpec, run_task
from flockstep.workloads.base import require_module

GRACE = 3.0
"""Seconds that the agents in the actors have to end by themselves after the run."""


class RayAgent:
    """The Ray actor that is the agent of its node."""

    def run(self, spec: TaskSpec) -> None:
        """Take part in the run as the agent of this node, until the run ends."""
        run_task(spec)


@contextlib.contextmanager
def ray_cluster(
    workers: int,
    nodes: int | None,
    cpus: float = 1.0,
    gpus: float = 0.0,
    timeout: float = TIMEOUT,
    arguments: Sequence[str] = (),
    output: Output = SHOWN,
) -> Iterator[TaskGathering]:
    """Context manager that yields nodes of a Ray cluster: the cluster to which this process belongs, or the cluster
    that runs on this machine.

    Args:
        workers: number of workers, or of replicas that several workers on one node hold.
        nodes: number of nodes that share the workers; None for all nodes of the cluster, but at most `workers`.
        cpus: cores that each worker reserves.
        gpus: GPUs that each worker reserves.
        timeout: seconds to wait for the nodes.
        arguments: arguments of a launched script.
        output: which of the scripts' output is shown, and how.

    Raises:
        ConfigurationError: there is no cluster, or this process is not on one of its nodes.
        MissingDependency: Ray is not installed.
    """
    for name, value in (("cpus", cpus), ("gpus", gpus)):
        if not value >= 0:
            raise ConfigurationError(f"{name} of a worker must be >= 0, got {value:g}; 1 core and 0 GPUs are usual")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # equal lines of several ranks; Ray has no argument for it
    for module in ("ray", "ray.util.placement_group", "ray.util.scheduling_strategies"):
        require_module(module, "ray", "a run on Ray")
    ray: Any = sys.modules["ray"]
    with _connected(ray):
        nodes = min(workers, _nodes_of(ray)) if nodes is None else nodes
        meeting = Meeting(ray.util.get_node_ip_address(), 0, secrets.token_bytes(32), timeout)
        starter = partial(_start, ray, cpus, gpus)
        yield TaskGathering(meeting, nodes, starter=starter, arguments=arguments, output=output)


def _start(ray: Any, cpus: float, gpus: float, specs: Sequence[TaskSpec], stack: ExitStack) -> Callable[[], str | None]:
    """Reserve the nodes, and start an actor on each.

    Raises:
        ConfigurationError: the cluster has not enough free cores or GPUs for the workers.
    """
    needs = [{"CPU": cpus * share, "GPU": gpus * share} for share in specs[0].shares]
    bundles = [{name: amount for name, amount in need.items() if amount} for need in needs]
    group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
    stack.callback(ray.util.remove_placement_group, group)
    if not group.wait(specs[0].timeout):
        free = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
        raise ConfigurationError(
            f"the Ray cluster could not reserve {len(bundles)} nodes with {bundles} within {specs[0].timeout:g} s; it "
            f"has {_nodes_of(ray)} nodes, with {free} free; use fewer workers, or fewer cores for each worker"
        )
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    actors, ends = [], []
    for spec, need in zip(specs, needs, strict=True):
        place = strategy(placement_group=group, placement_group_bundle_index=spec.node)
        amounts = {"num_cpus": need["CPU"], "num_gpus": need["GPU"]}
        actor = ray.remote(RayAgent).options(**amounts, max_restarts=0, scheduling_strategy=place).remote()
        actors.append(actor)
        ends.append(actor.run.remote(spec))
    stack.callback(_end, ray, actors, ends)
    return lambda: _failed(ray, ends)


@contextlib.contextmanager
def _connected(ray: Any) -> Iterator[None]:
    """Context manager: this process is a driver of a cluster; one that was connected before stays so."""
    if ray.util.client.ray.is_connected():
        raise ConfigurationError(
            "this program uses a Ray client, which the nodes of the cluster cannot reach; run the program on a node "
            "of the cluster, for example with: ray job submit -- python PROGRAM"
        )
    if ray.is_initialized():
        yield
        return
    handlers = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}  # Ray replaces the first
    try:
        ray.init(address="auto", logging_level="warning")
    except ConnectionError:
        raise ConfigurationError(
            "no Ray cluster runs on this machine; start a cluster with: ray start --head, or set RAY_ADDRESS, or "
            "call ray.init first"
        ) from None
    try:
        if threading.current_thread() is threading.main_thread():
            for one, handler in handlers.items():
                signal.signal(one, handler)
        yield
    finally:
        ray.shutdown()


def _nodes_of(ray: Any) -> int:
    """Number of nodes of the cluster that have cores."""
    return max(1, sum(bool(node["Alive"] and node["Resources"].get("CPU")) for node in ray.nodes()))


def _failed(ray: Any, ends: Sequence[Any]) -> str | None:
    """Why an actor's agent has ended before the run began; None if all are there."""
    ended, _ = ray.wait(list(ends), num_returns=len(ends), timeout=0)
    for end in ended:
        node = ends.index(end)
        try:
            ray.get(end)
        except ray.exceptions.RayTaskError as error:
            return f"the agent of node {node} on Ray failed: {_in_short(error.cause or error)}"
        except ray.exceptions.RayError as error:
            return f"the agent of node {node} on Ray was lost: {_in_short(error)}"
        return f"the agent of node {node} on Ray ended before the run began"
    return None


def _in_short(error: BaseException) -> str:
    """The last line of an error that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _end(ray: Any, actors: Sequence[Any], ends: Sequence[Any]) -> None:
    """Wait for the agents, and kill the actors, which ends what their agents have started."""
    ray.wait(list(ends), num_returns=len(ends), timeout=GRACE)
    for actor in actors:
        ray.kill(actor)
