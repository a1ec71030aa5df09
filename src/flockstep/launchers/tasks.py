"""Runs whose hosts are tasks of a cluster manager: this process coordinates, and every task is the agent of one
host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from flockstep.launchers.children import KERNELS, Child, end_fork_server, fork
from flockstep.launchers.entry import worker_main
from flockstep.launchers.gathering import Gathering, settings_of, times_of
from flockstep.launchers.host_messages import Accepted
from flockstep.launchers.hosts import ExpectedHosts, OtherHosts
from flockstep.launchers.meeting import Meeting
from flockstep.launchers.output import SHOWN, Output, OutputOptions
from flockstep.launchers.script import ScriptExecutable, program_of
from flockstep.records.config import RunConfig
from flockstep.records.scratch import scratch
from flockstep.runtime.member import NodeSpec
from flockstep.workloads.own_data import OwnData

THERE = 20.0
"""Maximum number of seconds that a task waits for the coordinator, which listens before tasks are started."""


@dataclass(frozen=True)
class TaskFile:
    """A Python file of the run: its path on the coordinator's host, and its content."""

    path: str
    content: bytes

    def found(self, folder: Path) -> str:
        """Return the path of the file on this host: the coordinator's path if it exists here, so that the file can
        import its neighbors; otherwise the path of a copy in `folder`.
        """
        path = Path(self.path)
        if path.is_file() and path.read_bytes() == self.content:
            return self.path
        copy = folder / path.name
        copy.write_bytes(self.content)
        return str(copy)


@dataclass(frozen=True)
class TaskSpec:
    """Specification of the task of one host, which the cluster manager passes to the task."""

    host: str
    port: int
    secret: bytes = field(repr=False)
    timeout: float
    nodes: int
    node: int
    shares: tuple[int, ...]
    """Number of workers on each host."""
    config: str
    """The run's configuration as TOML."""
    files: tuple[TaskFile, ...]
    """Python files of the run: the job or the script, if it is a file, and the files that register components."""
    arguments: tuple[str, ...]
    """Command-line arguments of the script."""
    output: OutputOptions


def run_task(spec: TaskSpec, own: OwnData | None = None) -> None:
    """Run the agent of a host until the run ends; `own` describes the samples of the host's only worker, if the worker
    has its own.

    Raises:
        ConfigurationError: the coordinator refused, or cannot be reached.
        RunError: the run failed.
    """
    with ExitStack() as stack:
        stack.callback(end_fork_server)  # a cluster manager may keep this process for the next task
        folder = stack.enter_context(scratch())
        here = {file.path: file.found(folder) for file in spec.files}
        config = RunConfig.from_toml(spec.config, "the run's configuration")
        imports = tuple(here[file] for file in config.imports)
        config = dataclasses.replace(config, job=here.get(config.job, config.job), imports=imports)
        meeting = Meeting(spec.host, spec.port, spec.secret, min(spec.timeout, THERE))
        gathering = Gathering(meeting, spec.nodes, spec.node, separate=True, shares=spec.shares)
        if config.kind == "train":
            gathering.serve(
                config,
                settings_of(config),
                lambda node_spec, accepted: _worker(node_spec, accepted, config, own),
            )
            return
        shown = Output(spec.output.ranks, spec.output.prefix, spec.output.folder)
        ScriptExecutable(program_of(config)[0], spec.arguments, shown, gathering).serve(
            config, settings_of(config), gathering
        )


def _worker(node_spec: NodeSpec, accepted: Accepted, config: RunConfig, own: OwnData | None) -> Child:
    ours = RunConfig.from_toml(accepted.config, "the coordinator's configuration").with_files_of(config)
    return fork(worker_main, (node_spec, config.threads or 1, ours.to_toml(), own), [KERNELS])


Starter = Callable[[Sequence[TaskSpec], ExitStack], Callable[[], str | None]]
"""Type of functions that start a task for each host, and return a function that says why a task has failed, or None if
no task has failed. Tasks that still run when the stack closes are ended.
"""


@dataclass(frozen=True)
class TaskGathering(Gathering):
    """The coordinator's part in a run for which the coordinator starts a task on each host."""

    _: KW_ONLY
    starter: Starter
    arguments: Sequence[str] = ()
    """Arguments of a launched script."""
    output: Output = SHOWN
    """Which of the scripts' output is shown, and how."""

    def hosts(self, config: RunConfig, settings: dict[str, str], stack: ExitStack, resumes: bool = False) -> OtherHosts:
        """Listen for the tasks, and start them. Tasks that still run when `stack` closes are ended."""
        nodes = range(self.nodes)  # the tasks are given the settings of `config`, not the user's
        placement = self.placement(config)
        expected = ExpectedHosts(
            nodes,
            placement,
            config.workers,
            settings_of(config),
            replica_size=config.processes_of_replica,
            together=config.processes_together,
        )
        hosts = OtherHosts(self.meeting, expected, config.to_toml(), *times_of(config))
        stack.enter_context(hosts)  # if a task cannot be started
        paths = [path for path in (config.job, *config.imports) if Path(path).is_file()]
        first = TaskSpec(
            self.meeting.host,
            hosts.port,
            self.meeting.secret,
            self.meeting.timeout,
            nodes=self.nodes,
            node=0,
            shares=tuple(map(len, placement.values())),
            config=config.to_toml(),
            files=tuple(TaskFile(path, Path(path).read_bytes()) for path in paths),
            arguments=tuple(self.arguments),
            output=OutputOptions(self.output.ranks, self.output.prefix, self.output.folder),
        )
        hosts.require_agents(self.starter([dataclasses.replace(first, node=node) for node in nodes], stack))
        return stack.enter_context(hosts)  # tasks are told of the end before they are ended
