"""The supervisor's line to one process of a run."""

from __future__ import annotations

from collections.abc import Mapping

from flockstep.arrays.schema import FlatArray
from flockstep.drivers.member import Hello
from flockstep.messages import Address, Beside, Message
from flockstep.transports.bus import LAUNCHER
from flockstep.transports.links import Control
from flockstep.transports.wire import Identity

FOR_ALL = ("lost", "left", "stop")
"""What a process has to hear at once, wherever it listens at the moment."""


class Link:
    """What a process said of itself, and the wire to it."""

    def __init__(self, control: Control, hello: Hello):
        self.hello = hello
        self.address = hello.address
        self.beside: Link | None = None
        """The line to the communicator that the process has beside its place in the run."""
        me = Identity(hello.run, LAUNCHER, hello.schema.hash, hello.largest)
        self.wire = control.link(hello.address, hello.line, me)

    def tell(self, tag: str, note: Beside | None = None, array: FlatArray | None = None) -> None:
        """Queue a message for the node, and what concerns all for its communicator; never waits for it.

        The array must not change afterwards: all links send it from where it lies.
        """
        if self.beside is not None and tag in FOR_ALL:
            self.beside.tell(tag, note)
        self.wire.send(tag, note, array)

    def dismiss(self, result: FlatArray | None, buffers: Mapping[Address, FlatArray | None]) -> None:
        """Tell the node to leave; where it wants the resulting model, with the final buffers of every worker."""
        for rank, array in buffers.items():
            if array is not None and self.address >= 0:
                self.tell("buffers", {"rank": rank}, array)
        self.tell("end", None, result)

    def receive(self) -> Message | None:
        """The next message of the node that is here by now.

        Raises:
            ProtocolError: it is not as agreed.
        """
        return self.wire.receive()

    def disconnected(self) -> bool:
        """Whether the connection broke since the last call."""
        return self.wire.disconnected()

    def close(self) -> None:
        """Close; what was not delivered yet never will be."""
        self.wire.close()
        if self.beside is not None:
            self.beside.close()
