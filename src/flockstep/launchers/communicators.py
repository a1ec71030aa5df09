"""Connects the communicators of a run: the sockets that scripts open in addition to the sockets of their strategy."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from flockstep.communicator.joining import COMMUNICATOR, NOTHING
from flockstep.drivers.member import NodeLost
from flockstep.errors import ConfigurationError
from flockstep.launchers.link import ProcessLink
from flockstep.messages import Address, Fields, node_name
from flockstep.transports.links import Frames

Connect = Callable[[Address, str, int], Frames]


@dataclass
class Communicators:
    """The communicators of the processes of a run, which are connected to each other as soon as all exist."""

    workers: int
    lost: Mapping[Address, NodeLost]
    done: set[Address]
    met: set[Address] = field(default_factory=set)

    def hear(
        self, link: ProcessLink, links: Mapping[Address, ProcessLink], note: Fields, connect: Connect, at: Path
    ) -> None:
        """Handle the message of a process that its communicator has been created or is connected; `at` is the folder of
        the sockets.

        Raises:
            ConfigurationError: the communicators do not accept arrays of the same size.
        """
        if "met" in note:
            self.met.add(link.address)
        else:
            self._add(link, links, note, connect)
        there = {address: one for address, one in links.items() if one.beside is not None}
        if len(self.met) == self.workers:
            shutil.rmtree(at, ignore_errors=True)  # all are connected
            self._tell(there, "go", {})
        elif len(there) == self.workers and not self.met:
            peers = {address: one.beside.hello.bus for address, one in there.items() if one.beside is not None}
            self._tell(there, COMMUNICATOR, {"peers": msgspec.json.encode(peers).decode()})

    def _add(self, link: ProcessLink, links: Mapping[Address, ProcessLink], note: Fields, connect: Connect) -> None:
        hello, largest = link.hello, int(note["largest"])
        for other in links.values():
            if other.beside is not None and other.beside.hello.largest != largest:
                raise ConfigurationError(
                    f"every worker must join with the same max_bytes, got {largest} from {node_name(link.address)} "
                    f"and {other.beside.hello.largest} from another worker; pass the same max_bytes to every call of "
                    "flockstep.join"
                )
        own = msgspec.structs.replace(
            hello, line=str(note["line"]), bus=str(note["bus"]), schema=NOTHING, largest=largest
        )
        link.beside = ProcessLink(connect, own)
        for lost in self.lost.values():
            link.beside.tell("lost", lost)
        for address in self.done:
            link.beside.tell("left", {"address": address, "step": 0})

    def _tell(self, links: Mapping[Address, ProcessLink], tag: str, note: Fields) -> None:
        for link in links.values():
            if link.beside is not None:
                link.beside.tell(tag, note)
