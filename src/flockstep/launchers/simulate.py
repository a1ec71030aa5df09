"""Runs a job in virtual time and writes its record."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from flockstep.frameworks.base import Engine
from flockstep.launchers.completion import TargetReached, finished, until_target
from flockstep.launchers.threads import limit_threads
from flockstep.records.config import RunConfig
from flockstep.records.events import HostsEvent
from flockstep.records.folder import EventWriter, RunFolder
from flockstep.records.summary import Summary
from flockstep.runtime.node_metrics import Emit
from flockstep.runtime.plan import Plan
from flockstep.runtime.runner import reporting_users_errors
from flockstep.runtime.setup import prepare
from flockstep.runtime.virtual import Simulation
from flockstep.runtime.virtual_split import SplitSimulation
from flockstep.simulation.compute import ComputeModel
from flockstep.simulation.faults import Fault
from flockstep.simulation.network import Network


def simulate(
    config: RunConfig,
    folder: Path,
    progress: Callable[[int, int, float], None] = lambda done, all_steps, t: None,
    overwrite: bool = False,
) -> Summary:
    """Simulate a run in virtual time, and write its record.

    Args:
        config: the run's configuration, with `kind="simulate"`.
        folder: folder of the record; created if it is missing.
        progress: called with the steps done by all workers, the total number of steps, and the virtual seconds.
        overwrite: replace the run that the folder holds.

    Returns:
        The summary of the record.

    Raises:
        ConfigurationError: the configuration is invalid; nothing was started.
        RunError: the run failed; the record is complete up to the failure, and its summary names the reason.
    """
    limit_threads(config.threads or 1)
    engine, plan, config = prepare(config)
    limit_threads(config.threads or 1)  # also the libraries that the job has imported
    network, compute = Network.parse(str(config.network)), ComputeModel.parse(str(config.compute))
    faults = [Fault.parse(fault) for fault in config.faults]
    config = dataclasses.replace(config, versions={**config.versions, "gradients": engine.batching})
    record = RunFolder(folder)
    every_step = plan.steps * config.workers
    with (
        record.created(config, overwrite),
        finished(record, config),
        EventWriter(record.node_events_file(None), flush_every=4096) as events,
    ):
        if len(hosts := network.hosts(config.workers)) > 1:
            events.write(HostsEvent(0.0, hosts))
        heard = until_target(config, events.write) if config.until_target else events.write
        run = _simulation(engine, plan, compute, network, heard, lambda done, t: progress(done, every_step, t), faults)
        with reporting_users_errors(), contextlib.suppress(TargetReached):
            run.run()
        run.stop()
        record.check_whole([None])
        if run.tracker.result is not None:
            record.write_result(*engine.as_saved(run.tracker.result))
        run.close()
    return record.read_summary()


def _simulation(
    engine: Engine,
    plan: Plan,
    compute: ComputeModel,
    network: Network,
    emit: Emit,
    progress: Callable[[int, float], None],
    faults: Sequence[Fault],
) -> Simulation | SplitSimulation:
    if plan.split is not None:
        return SplitSimulation(plan.split, plan, compute, network, emit, progress)
    return Simulation(engine, plan, compute, network, emit, progress, faults=faults)
