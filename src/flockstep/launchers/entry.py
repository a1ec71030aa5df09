"""Entry points of the forked processes of a run."""

from __future__ import annotations

import os
import sys
from functools import partial
from threading import Event

from flockstep.drivers.member import NodeSpec, die_with
from flockstep.drivers.plan import Plan
from flockstep.drivers.process import run_server, run_worker
from flockstep.drivers.setup import prepare
from flockstep.frameworks.base import Engine
from flockstep.frameworks.job import import_components
from flockstep.launchers.children import Child, fork
from flockstep.launchers.host_messages import ServerSpec
from flockstep.launchers.scratch import fork_servers_folder
from flockstep.launchers.signals import leave_to_supervisor
from flockstep.launchers.threads import JAX_THREADS, limit_threads
from flockstep.records.config import RunConfig
from flockstep.workloads.own_data import OwnData


def worker_main(node_spec: NodeSpec, threads: int, config: str, own: OwnData | None = None) -> None:
    """Entry point of a worker process: rebuild the job from the run's configuration and train.

    `own`: the samples of this worker, in place of its part of the job's samples.
    """
    folders = [] if own is None else [own.folder]
    die_with(node_spec.supervisor, node_spec.directory, *fork_servers_folder(), *folders)
    leaving = Event()
    leave_to_supervisor(leaving.set)
    limit_process(threads)
    while True:
        found = RunConfig.from_toml(config, "the run's configuration")
        asked = leaving if found.min_workers is not None else Event()
        ended = run_worker(node_spec, partial(_made, found, own), asked.is_set)
        if isinstance(ended, int):
            sys.exit(ended)
        assert ended.node_spec is not None
        node_spec, config = ended.node_spec, ended.config
        die_with(node_spec.supervisor, node_spec.directory)


def _made(config: RunConfig, own: OwnData | None) -> tuple[Engine, Plan]:
    engine, plan, _ = prepare(config, own)
    return engine, plan


def server_main(node_spec: NodeSpec, server: ServerSpec) -> None:
    """Entry point of a server process, which imports neither the job nor its framework, only strategy and optimizer."""
    die_with(node_spec.supervisor, node_spec.directory, *fork_servers_folder())
    leave_to_supervisor()
    limit_process(1)
    import_components(server.imports)
    sys.exit(run_server(node_spec, server.index, server.strategy, server.optimizer, server.schema, server.every))


def start_server(node_spec: NodeSpec, server: ServerSpec) -> Child:
    """Start a server in a process of this host."""
    return fork(server_main, (node_spec, server))


def limit_process(threads: int) -> None:
    """Let numerical libraries use `threads` threads in this process of a run, including libraries imported later."""
    os.environ["OMP_NUM_THREADS"] = os.environ[JAX_THREADS] = str(threads)
    limit_threads(threads)
