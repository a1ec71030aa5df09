"""A run over several hosts on each of which the user starts the same command; one host coordinates, and the others
join.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from flockstep.errors import ConfigurationError, require
from flockstep.launchers.children import Child
from flockstep.launchers.host_agent import HostAgent, on_host
from flockstep.launchers.host_messages import Accepted, Join
from flockstep.launchers.host_settings import ARGUMENTS, IMPORT, files_in
from flockstep.launchers.hosts import ExpectedHosts, OtherHosts, require_together
from flockstep.launchers.meeting import Meeting
from flockstep.links.connection import LINK_TIMEOUT
from flockstep.links.kinds import Transport
from flockstep.records.config import RunConfig
from flockstep.runtime.member import NodeSpec

BETWEEN_HOSTS = "tcp(memory=true)"
"""Transport of a run over several hosts: shared memory within a host, TCP between hosts."""
HEARTBEAT = 5.0
"""Default heartbeat timeout: seconds without an answer after which a node counts as lost."""


def link_timeout_of(config: RunConfig) -> float:
    """Return the link timeout: seconds for which the connection between two hosts may be interrupted before the host
    counts as lost.
    """
    return LINK_TIMEOUT if config.link_timeout is None else config.link_timeout


def times_of(config: RunConfig) -> tuple[float, float]:
    """Return the heartbeat timeout and the link timeout of a run's hosts, in seconds."""
    return config.heartbeat or HEARTBEAT, link_timeout_of(config)


OWN = ("versions", "facts", "imports", "job", "shared")
"""Fields of a configuration that may differ in text between hosts. For files that such a field names, the contents are
compared.
"""


@dataclass(frozen=True)
class Gathering:
    """The settings of one host in a run over several hosts."""

    meeting: Meeting
    nodes: int
    node: int | None = None
    """Number of this host; None for a coordinator without workers, whose workers are all on other hosts."""
    separate: bool = False
    """Whether the coordinator is a separate process without workers."""
    grows: bool = False
    """Whether workers of other hosts may join later."""
    shares: tuple[int, ...] = ()
    """Number of workers on each host; empty if the workers are divided evenly."""

    def __post_init__(self) -> None:
        if self.node is None:
            require(self.nodes >= 1, "--nodes", ">= 1", self.nodes, "it counts the hosts with workers")
            return
        least = 1 if self.separate or self.grows else 2
        require(self.nodes >= least, "--nodes", f">= {least}", self.nodes, "leave it out for one host")
        if not 0 <= self.node < self.nodes:
            raise ConfigurationError(
                f"--node-rank must be >= 0 and < {self.nodes}, the number of --nodes, got {self.node}; the host of "
                "the coordinator has rank 0"
            )

    @property
    def coordinates(self) -> bool:
        """Whether this host runs the coordinator."""
        return self.node is None or (self.node == 0 and not self.separate)

    def placement(self, config: RunConfig) -> dict[int, range]:
        """Return node → ranks: consecutive ranks on one host. Without `shares`, numbers of workers, or of replicas of
        several workers, differ by at most one.

        Raises:
            ConfigurationError: there are fewer workers than hosts, or `shares` puts a replica on several hosts.
        """
        together = config.processes_together
        units = config.workers // together
        if not self.shares and units < self.nodes:
            replicas = f" for one replica of {together} processes on each" * (together > 1)
            raise ConfigurationError(
                f"a run over {self.nodes} hosts needs at least {self.nodes * together} workers{replicas}, got "
                f"{config.workers}; raise -n, the number of workers of all hosts"
            )
        ends = [units * node // self.nodes * together for node in range(self.nodes + 1)]
        if self.shares:
            ends = [0, *accumulate(self.shares)]
        found = {node: range(ends[node], ends[node + 1]) for node in range(self.nodes)}
        require_together({f"node {node}": ranks for node, ranks in found.items()}, together)
        return found

    def ranks(self, config: RunConfig) -> range:
        """Return the ranks of this host's workers."""
        return range(0) if self.node is None else self.placement(config)[self.node]

    def over(self, config: RunConfig) -> RunConfig:
        """Return the configuration with the number of workers and the transport that nodes on this host use; a
        coordinator without workers leaves each agent to insert its own host's address.

        Raises:
            ConfigurationError: the configuration names a transport that reaches no other host.
        """
        transport, address = config.transport or BETWEEN_HOSTS, self.meeting.address()
        here = on_host(Transport.parse(transport), "127.0.0.1" if self.node is None else self.meeting.own or address)
        if self.node is not None:
            transport = str(here)
        return dataclasses.replace(config, transport=transport, workers=sum(self.shares) or config.workers)

    def hosts(self, config: RunConfig, settings: dict[str, str], stack: ExitStack, resumes: bool = False) -> OtherHosts:
        """Listen for the other hosts, as the coordinator, until `stack` ends.

        `settings` holds the options as the user gave them; if the run `resumes`, only its files are compared.

        Raises:
            ConfigurationError: this process cannot listen at the coordinator's address.
        """
        own = self.ranks(config)
        others = range(int(bool(own)), self.nodes)
        placement = {node: ranks for node, ranks in self.placement(config).items() if node in others}
        compared = files_in(settings) if resumes else settings
        expected = ExpectedHosts(
            others,
            placement,
            config.workers,
            compared,
            own=own,
            replica_size=config.processes_of_replica,
            together=config.processes_together,
            resumes=resumes,
        )
        times = times_of(config)
        return stack.enter_context(OtherHosts(self.meeting, expected, config.to_toml(), *times))

    def serve(
        self, config: RunConfig, settings: dict[str, str], start_worker: Callable[[NodeSpec, Accepted], Child]
    ) -> None:
        """Take part, until the end, in a run that another host coordinates.

        Raises:
            ConfigurationError: the coordinator refused, or cannot be reached.
            RunError: the run failed.
        """
        assert self.node is not None, "a coordinator without workers serves nobody"
        join = Join(self.node, self.nodes, config.workers, ranks=tuple(self.ranks(config)), settings=settings)
        times = times_of(config)
        HostAgent(self.meeting, join, start_worker, *times, imports=config.imports).run()


def settings_of(config: RunConfig, arguments: Sequence[str] = ()) -> dict[str, str]:
    """Return the settings that must be equal on all hosts: the options as the user gave them, the hashes of the files
    that are run, and the script's arguments.
    """
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    settings = {name: str(value) for name, value in fields.items() if name not in OWN and value is not None}
    settings["job"] = named_content(config.job)
    if arguments:
        settings[ARGUMENTS] = shlex.join(arguments)
    for number, file in enumerate(config.imports):
        settings[f"{IMPORT}{number}"] = named_content(file)
    return settings


def named_content(file: str) -> str:
    """Return the name and the hash of a job's file; the name of a built-in job is returned unchanged."""
    path = Path(file)
    if not path.is_file():
        return file
    return f"{path.name} (SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]})"
