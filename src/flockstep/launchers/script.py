"""Runs a user's script, unchanged, on several workers of this machine."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from flockstep.arrays.schema import FlatArray
from flockstep.drivers.member import Hello, NodeSpec
from flockstep.drivers.node_spec import NODE_SPEC, spec_to_text
from flockstep.errors import ConfigurationError
from flockstep.expression import from_data
from flockstep.frameworks.job import import_components
from flockstep.launchers import script_entry
from flockstep.launchers.children import Child, Script, drain_all, fork, refuse_program
from flockstep.launchers.entry import server_main
from flockstep.launchers.node_progress import NodeProgress
from flockstep.launchers.open_files import require_open_files
from flockstep.launchers.output import SHOWN, Output, RankOutput, Sink
from flockstep.launchers.supervisor import Outcome, Supervisor
from flockstep.launchers.train import HEARTBEAT, finished, keep_newest, newest_model
from flockstep.messages import Address
from flockstep.optimizers.base import Optimizer
from flockstep.records import owner
from flockstep.records.config import RunConfig
from flockstep.records.folder import EventWriter, RunFolder
from flockstep.records.summary import Summary
from flockstep.transports.base import Transport

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that set the number of threads of numerical libraries; without them each process uses every
core.
"""


def launch(
    script: Path,
    arguments: Sequence[str],
    config: RunConfig,
    folder: Path,
    output: Output = SHOWN,
    overwrite: bool = False,
    show: Callable[[dict[Address, NodeProgress]], None] = lambda nodes: None,
) -> Summary:
    """Run a user's script on `config.workers` processes of this machine, and write the record.

    A program must guard the call, because server processes import the program again:

        if __name__ == "__main__":
            config = RunConfig(kind="launch", job="mine.py", strategy="as the script says", workers=2)
            launch(Path("mine.py"), [], config, Path("runs/mine"))

    Args:
        script: path of the Python script.
        arguments: command-line arguments of the script.
        config: the run's configuration, with `kind="launch"`.
        folder: folder of the record; created if it is missing.
        output: which of the scripts' output is shown, how, and where it is written.
        overwrite: replace the run that the folder holds, and the files of the scripts' output.
        show: called from time to time with the state of every node.

    Returns:
        The summary of the record.

    Raises:
        ConfigurationError: the script does not exist, the workers do not agree on model and strategy, or the scripts'
            output cannot be written where it should be.
        RunError: the run failed; the record is complete up to the failure.
    """
    refuse_program()
    if not script.is_file():
        raise ConfigurationError(f"there is no script {script}; give the path of a Python file")
    import_components(config.imports)
    require_open_files(config.workers)
    output.require_folder(overwrite)
    record = RunFolder(folder)
    with record.created(config, overwrite):
        _launch(script, arguments, config, record, output.sinks(config.workers), show)
    return record.read_summary()


def _launch(
    script: Path,
    arguments: Sequence[str],
    config: RunConfig,
    record: RunFolder,
    sinks: Sequence[RankOutput],
    show: Callable[[dict[Address, NodeProgress]], None],
) -> None:
    scripts: list[Script] = []

    def start_worker(node_spec: NodeSpec) -> Child:
        node_spec = dataclasses.replace(node_spec, seed=config.seed, imports=config.imports)
        scripts.append(start_script(script, arguments, node_spec, config.threads, sinks[node_spec.address]))
        return scripts[-1]

    def start_server(node_spec: NodeSpec, index: int, hello: Hello) -> Child:
        optimizer = str(from_data(hello.optimizer, Optimizer))  # type: ignore[type-abstract]
        node_spec = dataclasses.replace(node_spec, seed=config.seed)
        return fork(server_main, (node_spec, index, hello.strategy, optimizer, hello.schema, 0, config.imports))

    supervisor = Supervisor(
        config.workers,
        Transport.parse(config.transport or "shared_memory"),
        config.heartbeat or HEARTBEAT,
        record.path.resolve(),
        start_worker,
        start_server,
        show,
        patience=None,
        step_timeout=config.step_timeout,
    )
    try:
        supervisor.run(result_of)
        drain_all(scripts)
        for rank, sink in enumerate(sinks):  # a run that failed early has started fewer scripts
            sink.close(failed=rank < len(scripts) and bool(scripts[rank].exit_code()))
        conclude(record, config, supervisor.outcome)
    finally:
        supervisor.forget()


def conclude(record: RunFolder, config: RunConfig, outcome: Outcome) -> None:
    """Complete the record with what only the supervisor knows.

    Raises:
        RunError: the run failed, or a part of its record was lost.
    """
    owner.check(record.path)
    if outcome.strategy is not None and outcome.strategy.traits.results:
        config = dataclasses.replace(config, strategy=str(outcome.strategy))
        record.write_config(config)
    with finished(record, config) as notes:
        with EventWriter(record.node_events_file(None)) as events:
            for lost in outcome.lost.values():
                events.write(lost)
        if outcome.strategy is not None and outcome.strategy.traits.results:
            keep_newest(record, outcome.strategy.traits.results[0], outcome)
        notes += outcome.warnings
        if outcome.error is not None:
            raise outcome.error
        record.check_whole(outcome.nodes)


def start_script(
    script: Path, arguments: Sequence[str], node_spec: NodeSpec, threads: int | None, sink: Sink
) -> Script:
    """Start the script as one worker, whose output `sink` takes.

    `threads` None keeps the user's thread variables, or sets one thread if there are none.
    """
    command = [sys.executable, "-I", "-S", script_entry.__file__, str(node_spec.supervisor), str(script), *arguments]
    chosen = threads is None and any(name in os.environ for name in THREADS)
    limits = {} if chosen else dict.fromkeys(THREADS, str(threads or 1))
    environment = {**os.environ, **limits, **place_of(node_spec), NODE_SPEC: spec_to_text(node_spec)}
    return Script(command, environment, sink)


def place_of(node_spec: NodeSpec) -> dict[str, str]:
    """Environment variables in which scripts look for their rank, as torchrun names them.

    All workers run on this host.
    """
    rank, workers = str(node_spec.address), str(node_spec.workers)
    return {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}


def result_of(outcome: Outcome) -> FlatArray | None:
    """The model that the strategy's default result policy selects from the final parameters."""
    if outcome.strategy is None or not outcome.strategy.traits.results:
        return None
    return newest_model(outcome.newest.tick(outcome.lost), outcome.strategy.traits.results[0], outcome)
