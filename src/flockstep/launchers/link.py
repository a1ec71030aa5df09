"""The supervisor's link to one process of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flockstep.arrays.schema import FlatArray
from flockstep.drivers.member import Hello
from flockstep.messages import Address, AnyNote, Message
from flockstep.transports.bus import LAUNCHER
from flockstep.transports.links import Frames, SupervisorLink
from flockstep.transports.wire import SenderIdentity

FOR_ALL = ("lost", "left", "stop")
"""Tags of messages that a process must receive at once; they are sent on the process's own link and on the link of its
communicator.
"""


class ProcessLink:
    """A process of the run: the facts that it reported at its start, and the connection to it."""

    def __init__(self, connect: Callable[[Address, str, int], Frames], hello: Hello):
        """`connect` opens the connection to a node that listens at an address, with its largest array in bytes."""
        self.hello = hello
        self.address = hello.address
        self.beside: ProcessLink | None = None
        """The link to the process's communicator, if it has opened one."""
        me = SenderIdentity(hello.run, LAUNCHER, hello.schema.hash, hello.largest)
        self.frames = connect(hello.address, hello.line, hello.largest)
        self._link = SupervisorLink(self.frames, hello.address, me)

    def tell(self, tag: str, note: AnyNote | None = None, array: FlatArray | None = None) -> None:
        """Queue a message for the node without waiting.

        Messages that concern all processes also go to the node's communicator.

        The array must not change afterwards, because all links send it without a copy.
        """
        if self.beside is not None and tag in FOR_ALL:
            self.beside.tell(tag, note)
        self._link.send(tag, note, array)

    def dismiss(self, result: FlatArray | None, buffers: Mapping[Address, FlatArray | None]) -> None:
        """Tell the node that the run has ended; on request, send it the resulting model and the final buffers of every
        worker.
        """
        for rank, array in buffers.items():
            if array is not None and self.address >= 0:
                self.tell("buffers", {"rank": rank}, array)
        self.tell("end", None, result)

    def receive(self) -> Message | None:
        """Return the next message that has arrived from the node; None if no message has arrived.

        Raises:
            ProtocolError: the message breaks the protocol.
        """
        return self._link.receive()

    def disconnected(self) -> bool:
        """Return whether the connection has broken since the last call."""
        return self._link.disconnected()

    def close(self) -> None:
        """Close the link; queued messages are dropped."""
        self._link.close()
        if self.beside is not None:
            self.beside.close()
