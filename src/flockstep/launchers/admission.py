"""Lets the processes of a run in: starts them, checks that all of them declare the same, and connects them."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from flockstep.communicator.joining import BESIDE, COMMUNICATOR, rule_of
from flockstep.errors import ConfigurationError
from flockstep.expression import from_data
from flockstep.launchers.children import Child
from flockstep.launchers.executable import Executable
from flockstep.launchers.host_messages import ServerSpec
from flockstep.launchers.hosts import OtherHosts
from flockstep.launchers.open_files import require_open_files
from flockstep.launchers.peers import Outcome, ProcessLink, RunPeer, RunPeers
from flockstep.links.control import Control, Frames
from flockstep.links.kinds import Transport
from flockstep.links.shared_memory import SharedMemory
from flockstep.links.wire import PROTOCOL
from flockstep.messages import Address, node_name
from flockstep.optimizers.base import Optimizer
from flockstep.records.failpoints import reach
from flockstep.records.scratch import scratch
from flockstep.runtime.member import Hello, NodeSpec, Welcome
from flockstep.runtime.part_group import groups_of
from flockstep.runtime.plan import whole_cluster


class Admission:
    """The way of a run's processes into the run: start, hello, welcome, ready."""

    began: float | None = None
    """Time at which all nodes were ready, in seconds of the monotonic clock."""
    control: Control
    """The socket to which processes say hello."""
    directory: Path
    """Folder of the sockets."""
    _memory: SharedMemory | None = None
    """Segment of the workers, until all of them have attached to it."""

    def __init__(
        self,
        spec: NodeSpec,
        executable: Executable,
        peers: RunPeers,
        outcome: Outcome,
        start: Callable[[NodeSpec], Child | None],
        hosts: OtherHosts,
        first: Admission | None = None,
    ):
        """Args:
        spec: the node specification of every process, without its address and the places of the sockets.
        executable: what the workers execute.
        peers: the processes that are expected.
        outcome: receives schema, strategy and hosts.
        start: starts a worker; returns None if something else starts it.
        hosts: the other hosts.
        first: the admission to the run, if this is the one to a later call of `distribute`.
        """
        self.executable, self.peers, self.hosts = executable, peers, hosts
        self.spec, self._outcome, self._start, self._first = spec, outcome, start, first
        self._workers, self._transport = spec.workers, Transport.parse(spec.transport)
        self._met: set[Address] = set()
        """Processes whose communicator is connected to all others."""

    def open(self, files: ExitStack) -> None:
        """Create the sockets, which `files` closes, and start the workers; those of a later call are already there."""
        self.directory = files.enter_context(scratch())
        if self._first is not None:
            self.control = self._first.control
            return
        files.callback(self._transport.clean_up, self.directory)
        self._transport.prepare(self.directory)
        self.control = Control(f"ipc://{self.directory / 'control'}", self.spec.heartbeat)
        files.callback(self.control.close)
        self.hosts.meet()
        for rank in range(self._workers):
            self.peers[rank].child = self._start(self._spec_of(rank))

    def _spec_of(self, address: Address) -> NodeSpec:
        control, directory = self.control.address, str(self.directory)
        return dataclasses.replace(self.spec, address=address, control=control, directory=directory)

    def hello(self, hello: Hello, frames: Frames, files: ExitStack) -> bool:
        """Link a process; return whether it may join.

        Raises:
            ConfigurationError: the process does not declare what the others have declared.
        """
        peer = self.peers[hello.address]
        if hello.beside:
            if peer.link is not None:
                self._connect_communicator(hello, frames, peer.link)
            return peer.link is not None
        if peer.link is not None or peer.gone:  # a lost node may not return
            return False
        try:
            self._check(hello)
        except ConfigurationError:
            frames.close()
            raise
        peer.link = ProcessLink(frames, hello)
        files.callback(peer.link.close)
        if self._outcome.strategy is not None and all(self.peers[rank].link for rank in range(self._workers)):
            for address in self.peers.cluster.processes[self._workers :]:
                if address not in self.peers:
                    require_open_files(1, more=0)
                    one = self.peers[address] = RunPeer()
                    one.child = self._start_server(self._spec_of(address), self.peers.link(0).hello)
            if len(self.peers.links) == len(self.peers.cluster.processes):
                self._welcome()
        return True

    def _check(self, hello: Hello) -> None:
        """Check that every node has the same version, model and strategy as the first node that joined."""
        if hello.protocol != PROTOCOL:
            raise ConfigurationError(
                f"{node_name(hello.address)} uses protocol {hello.protocol}, the launcher uses protocol "
                f"{PROTOCOL}; install the same version of flockstep for every worker"
            )
        outcome, strategy = self._outcome, rule_of(hello.strategy)
        if outcome.schema is None or outcome.strategy is None:
            outcome.schema, outcome.strategy = hello.schema, strategy
            outcome.sizes = outcome.sizes or hello.sizes
            replicas = self._workers // outcome.parts
            strategy.check(replicas)
            self.executable.require_possible(strategy, hello.repeats)
            self.peers.cluster = whole_cluster(strategy.cluster(replicas), outcome.parts)
            return
        outcome.schema.require(hello.schema, node_name(hello.address))
        if strategy != outcome.strategy:
            raise ConfigurationError(
                f"every worker must use the same strategy, got {hello.strategy} from {node_name(hello.address)} and "
                f"{outcome.strategy} from another worker; give every worker the same strategy"
            )

    def _start_server(self, spec: NodeSpec, hello: Hello) -> Child | None:
        """Start a server or a backup, on this host or on another one; on this host in a later call."""
        cluster, sizes, group = self.peers.cluster, self._outcome.sizes, None
        index = -1 - cluster.logical(spec.address)
        if sizes:
            servers = cluster.servers // len(sizes)
            group, index = groups_of(sizes, servers)[index // servers], index % servers
        optimizer = str(from_data(hello.optimizer, Optimizer))  # type: ignore[type-abstract]
        every = self.executable.every
        server = ServerSpec(index, hello.strategy, optimizer, hello.schema, every, spec.imports, group)
        if self._first is not None and all(map(self.hosts.has, range(self._workers))):
            raise ConfigurationError(
                f"a later call of distribute starts its servers on the coordinator's host, got {hello.strategy} and a "
                "coordinator without workers, whose host no worker can reach; use a strategy without servers in "
                "later calls"
            )
        turn = cluster.turn(spec.address)
        if self._first is None and self.hosts.place_server(spec.address, turn, cluster.beside):
            return self.hosts.start(spec, server)
        return self.executable.start_server(spec, server)

    def _welcome(self) -> None:
        """All nodes have joined: send each of them the addresses of the others."""
        reach("meeting.begun")
        links, cluster, parts = self.peers.links, self.peers.cluster, self.executable.parts
        buses = {address: link.hello.bus for address, link in links.items()}
        if self._outcome.parts == 1:
            self._memory = self._transport.share(self._workers, links[0].hello.schema.nbytes)
        places: dict[str, list[int]] = {}
        for rank in self.peers.view.ranks:
            places.setdefault(links[rank].hello.host, []).append(rank)
        hosts = self._outcome.hosts = tuple(map(tuple, places.values()))
        memory = "" if self._memory is None else self._memory.address
        welcome = Welcome(self.peers.view, hosts, cluster.servers, buses, memory, cluster.replicas)
        for address, link in links.items():
            link.tell("welcome", welcome)
            if parts is not None:
                link.tell("values", None, parts.of_node(address, cluster.servers // self._outcome.parts))

    def ready(self, address: Address) -> bool:
        """Note that a node is ready; return whether all nodes are, so that the run begins."""
        self.peers[address].ready = True
        if not all(one.ready or one.gone for one in self.peers.values()):
            return False
        self.began, self._memory = time.monotonic(), None
        self.hosts.begin()
        return True

    def _connect_communicator(self, hello: Hello, frames: Frames, link: ProcessLink) -> None:
        """Let in the communicator of a process, which has said hello on a connection of its own, beside `link`. The
        communicators of a run are connected to each other as soon as all exist.

        Raises:
            ConfigurationError: the communicators do not accept arrays of the same size.
        """
        for other in self._communicators().values():
            if other.hello.largest != hello.largest:
                raise ConfigurationError(
                    f"every worker must join with the same max_bytes, got {hello.largest} from "
                    f"{node_name(hello.address)} and {other.hello.largest} from another worker; pass the same "
                    "max_bytes to every call of flockstep.join"
                )
        link.beside = ProcessLink(frames, hello)
        for one in self.peers.values():
            if one.told is not None:
                link.beside.tell("lost", one.told)
        for address in self.peers.done:
            link.beside.tell("left", {"address": address, "step": 0})
        there = self._communicators()
        if len(self._met) == self._workers:
            for beside in there.values():
                beside.tell("go")
        elif len(there) == self._workers and not self._met:
            buses = msgspec.json.encode({address: beside.hello.bus for address, beside in there.items()}).decode()
            for beside in there.values():
                beside.tell(COMMUNICATOR, {"peers": buses})

    def communicator_met(self, address: Address) -> None:
        """Note that a process's communicator is connected to all others."""
        self._met.add(address)
        if len(self._met) == self._workers:
            for beside in self._communicators().values():
                beside.tell("go")
            shutil.rmtree(self.directory / BESIDE, ignore_errors=True)  # all are connected

    def _communicators(self) -> dict[Address, ProcessLink]:
        return {address: link.beside for address, link in self.peers.links.items() if link.beside is not None}
