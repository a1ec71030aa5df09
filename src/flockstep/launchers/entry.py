"""Entry points of the forked processes of a run."""

from __future__ import annotations

import os
import socket
import sys
from functools import partial
from pathlib import Path
from threading import Event
from typing import NoReturn

import msgspec

from flockstep.arrays.memory import settle_down
from flockstep.errors import FlockstepError, in_short
from flockstep.frameworks.base import Engine
from flockstep.frameworks.job import JOB_FILES, import_components
from flockstep.launchers.children import Child, fork
from flockstep.launchers.host_messages import ServerSpec
from flockstep.launchers.threads import JAX_THREADS, limit_threads
from flockstep.partitions.split_facts import SplitFacts
from flockstep.records.config import RunConfig
from flockstep.runtime.member import NodeSpec, die_with, on_same_host
from flockstep.runtime.plan import Plan
from flockstep.runtime.process import JobWorker, run_server, warm_up
from flockstep.runtime.setup import BuiltJob, digest, prepare, require_unchanged
from flockstep.runtime.signals import leave_to_supervisor
from flockstep.workloads.own_data import OwnData


class Part(msgspec.Struct):
    """A worker's part in a run: its node specification, and the run's configuration as TOML."""

    node_spec: NodeSpec
    config: str


def worker_main(node_spec: NodeSpec, threads: int, config: str, own: OwnData | None = None) -> None:
    """Entry point of a worker process: rebuild the job from the run's configuration and train.

    `own` holds the samples of this worker, if they replace its part of the job's samples.
    """
    folders = [] if own is None else [own.folder]
    leaving = _obey(threads)
    _work(Part(node_spec, config), _Maker(own), leaving, *folders)


def newcomer_main(supervisor: int, threads: int, config: str, feed: socket.socket) -> None:
    """Entry point of a worker process that will join a run: build the job while the run continues, and wait for a part
    in the run.

    Args:
        supervisor: process id of the supervisor.
        threads: threads of the numerical libraries.
        config: the run's configuration so far, as TOML.
        feed: this end of a pair of sockets. The process writes `READY`, or the error of the job; then it reads its
            `Part`, and ends if it receives none.
    """
    die_with(supervisor)
    leaving, make = _obey(threads), _Maker(None)
    found = RunConfig.from_toml(config, "the run's configuration")
    try:
        require_unchanged(found, digest(Path(found.job)) if found.job.endswith(JOB_FILES) else None)
        make(found)
    except Exception as error:  # noqa: BLE001 - the job's code may raise anything
        feed.sendall((str(error) if isinstance(error, FlockstepError) else in_short(error)).encode())
        sys.exit(1)
    feed.sendall(READY)
    with feed, feed.makefile("rb") as file:
        data = file.read()
    if not data:
        return
    _work(msgspec.json.decode(data, type=Part), make, leaving)


READY = b"\0"
"""Message of a process that will join the run, after it has built the job."""


def _obey(threads: int) -> Event:
    """Leave the end of this process to the supervisor; return the event that a signal asks this process to leave."""
    leaving = Event()
    leave_to_supervisor(leaving.set)
    limit_process(threads)
    return leaving


def _work(part: Part, make: _Maker, leaving: Event, *folders: str) -> NoReturn:
    """Take part in a run as a worker, and again whenever the run continues with other workers.

    `folders` are removed when the coordinator ends, as is the folder of its sockets.
    """
    worker = JobWorker()
    while True:
        node_spec, found = part.node_spec, RunConfig.from_toml(part.config, "the run's configuration")
        die_with(node_spec.supervisor, node_spec.directory, *folders)
        asked = leaving if found.min_workers is not None else Event()
        ended = worker.run(node_spec, partial(make, found, node_spec.facts), asked.is_set)
        if isinstance(ended, int):
            sys.exit(ended)
        assert ended.node_spec is not None
        config = RunConfig.from_toml(ended.config, "the run's configuration").with_files_of(found)
        part = Part(on_same_host(ended.node_spec, node_spec), config.to_toml())


class _Maker:
    """Builds the job of a worker once, and a plan each time that the run continues with other workers."""

    def __init__(self, own: OwnData | None):
        self._own = own
        self._built: BuiltJob | None = None

    def __call__(self, config: RunConfig, facts: SplitFacts | None = None) -> tuple[Engine, Plan]:
        """The engine, which has computed a gradient, and the plan of a run; `facts`: see `BuiltJob.of`."""
        first, self._built = self._built is None, self._built or BuiltJob.of(config, self._own, facts)
        engine, plan, _ = prepare(config, self._own, self._built)
        if first and plan.split is None:  # no worker of a split model computes the gradient of the whole model
            warm_up(engine, plan.batch)
        if first:
            settle_down()
        return engine, plan


def server_main(node_spec: NodeSpec, server: ServerSpec) -> None:
    """Entry point of a server process, which imports neither the job nor its framework, only strategy and optimizer."""
    die_with(node_spec.supervisor, node_spec.directory)
    leave_to_supervisor()
    limit_process(1)
    import_components(server.imports)
    facts = server.index, server.strategy, server.optimizer, server.schema, server.every, server.group
    sys.exit(run_server(node_spec, *facts))


def start_server(node_spec: NodeSpec, server: ServerSpec) -> Child:
    """Start a server in a process of this host."""
    return fork(server_main, (node_spec, server))


def limit_process(threads: int) -> None:
    """Limit numerical libraries to `threads` threads in this process of a run, including libraries imported later."""
    os.environ["OMP_NUM_THREADS"] = os.environ[JAX_THREADS] = str(threads)
    limit_threads(threads)
