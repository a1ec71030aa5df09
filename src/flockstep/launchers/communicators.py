"""Connects the communicators of a run: the sockets that scripts open in addition to the sockets of their strategy."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from flockstep.communicator.joining import BESIDE, COMMUNICATOR
from flockstep.errors import ConfigurationError
from flockstep.launchers.link import ProcessLink
from flockstep.launchers.peers import RunPeers
from flockstep.links.control import Frames
from flockstep.messages import Address, node_name
from flockstep.runtime.member import Hello


class Communicators:
    """The communicators of the processes of a run, which are connected to each other as soon as all exist."""

    def __init__(self, peers: RunPeers):
        self._peers = peers
        self._met: set[Address] = set()
        """Processes whose communicator is connected to all others."""

    def add(self, hello: Hello, frames: Frames, link: ProcessLink) -> None:
        """Connect a communicator, which has said hello on a connection of its own, beside `link`.

        Raises:
            ConfigurationError: the communicators do not accept arrays of the same size.
        """
        for other in self._beside().values():
            if other.hello.largest != hello.largest:
                raise ConfigurationError(
                    f"every worker must join with the same max_bytes, got {hello.largest} from "
                    f"{node_name(hello.address)} and {other.hello.largest} from another worker; pass the same "
                    "max_bytes to every call of flockstep.join"
                )
        link.beside = ProcessLink(frames, hello)
        for one in self._peers.values():
            if one.told is not None:
                link.beside.tell("lost", one.told)
        for address in self._peers.done:
            link.beside.tell("left", {"address": address, "step": 0})
        there = self._beside()
        if len(self._met) == self._peers.workers:
            for beside in there.values():
                beside.tell("go")
        elif len(there) == self._peers.workers and not self._met:
            buses = msgspec.json.encode({address: beside.hello.bus for address, beside in there.items()}).decode()
            for beside in there.values():
                beside.tell(COMMUNICATOR, {"peers": buses})

    def meet(self, address: Address, at: Path) -> None:
        """A process's communicator is connected to all others; `at` is the folder of the sockets."""
        self._met.add(address)
        if len(self._met) == self._peers.workers:
            for beside in self._beside().values():
                beside.tell("go")
            shutil.rmtree(at / BESIDE, ignore_errors=True)  # all are connected

    def _beside(self) -> dict[Address, ProcessLink]:
        links = self._peers.links.items()
        return {address: link.beside for address, link in links if link.beside is not None}
