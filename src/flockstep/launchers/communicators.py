"""Connects the communicators of a run: the sockets that scripts open in addition to the sockets of their strategy."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from flockstep.communicator.joining import BESIDE, COMMUNICATOR
from flockstep.drivers.member import Hello, NodeLost
from flockstep.errors import ConfigurationError
from flockstep.launchers.link import ProcessLink
from flockstep.messages import Address, Fields, node_name
from flockstep.transports.links import Frames


@dataclass
class Communicators:
    """The communicators of the processes of a run, which are connected to each other as soon as all exist."""

    workers: int
    lost: Mapping[Address, NodeLost]
    done: set[Address]
    met: set[Address] = field(default_factory=set)

    def add(self, hello: Hello, frames: Frames, links: Mapping[Address, ProcessLink]) -> None:
        """Connect a communicator, which has said hello on a connection of its own.

        Raises:
            ConfigurationError: the communicators do not accept arrays of the same size.
        """
        for other in links.values():
            if other.beside is not None and other.beside.hello.largest != hello.largest:
                raise ConfigurationError(
                    f"every worker must join with the same max_bytes, got {hello.largest} from "
                    f"{node_name(hello.address)} and {other.beside.hello.largest} from another worker; pass the same "
                    "max_bytes to every call of flockstep.join"
                )
        beside = links[hello.address].beside = ProcessLink(frames, hello)
        for lost in self.lost.values():
            beside.tell("lost", lost)
        for address in self.done:
            beside.tell("left", {"address": address, "step": 0})
        self._go_on(links)

    def meet(self, address: Address, links: Mapping[Address, ProcessLink], at: Path) -> None:
        """A process's communicator is connected to all others; `at` is the folder of the sockets."""
        self.met.add(address)
        self._go_on(links)
        if len(self.met) == self.workers:
            shutil.rmtree(at / BESIDE, ignore_errors=True)  # all are connected

    def _go_on(self, links: Mapping[Address, ProcessLink]) -> None:
        there = {address: one for address, one in links.items() if one.beside is not None}
        if len(self.met) == self.workers:
            self._tell(there, "go", {})
        elif len(there) == self.workers and not self.met:
            peers = {address: one.beside.hello.bus for address, one in there.items() if one.beside is not None}
            self._tell(there, COMMUNICATOR, {"peers": msgspec.json.encode(peers).decode()})

    def _tell(self, links: Mapping[Address, ProcessLink], tag: str, note: Fields) -> None:
        for link in links.values():
            if link.beside is not None:
                link.beside.tell(tag, note)
