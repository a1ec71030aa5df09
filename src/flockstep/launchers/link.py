"""The supervisor's link to one process of a run."""

from __future__ import annotations

from collections.abc import Mapping

from flockstep.arrays.schema import FlatArray
from flockstep.links.bus import LAUNCHER
from flockstep.links.control import Frames, framed, unframed
from flockstep.links.wire import MAX_CODING, SenderIdentity
from flockstep.messages import Address, AnyNote, Message
from flockstep.runtime.member import Hello

FOR_ALL = ("lost", "left", "stop")
"""Tags of messages that a process must receive at once; they are sent on the process's own link and on the link of its
communicator.
"""


class ProcessLink:
    """A process of the run: the facts that it reported at its start, and the connection to it."""

    def __init__(self, frames: Frames, hello: Hello):
        """`frames` is the connection on which `hello` has arrived."""
        self.hello = hello
        self.frames = frames
        self.address = hello.address
        self.beside: ProcessLink | None = None
        """The link to the process's communicator, if it has opened one."""
        self._me = SenderIdentity(hello.run, LAUNCHER, hello.schema.hash, hello.largest)
        self._sent_count = 0

    def tell(self, tag: str, note: AnyNote | None = None, array: FlatArray | None = None) -> None:
        """Queue a message for the node without waiting.

        Messages that concern all processes also go to the node's communicator.

        The array must not change afterwards, because all links send it without a copy.
        """
        if self.beside is not None and tag in FOR_ALL:
            self.beside.tell(tag, note)
        self._sent_count += 1
        message = Message(LAUNCHER, tag, array, note or {}, number=self._sent_count)
        self.frames.send(framed(message, self._me))

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
        if self.beside is not None:  # a communicator says nothing but that it is alive
            while self.beside.receive() is not None:
                pass
        frames = self.frames.receive(self._me.model_bytes + MAX_CODING)
        return None if frames is None else unframed(frames, self.address, self._me)

    def disconnected(self) -> bool:
        """Return whether the process is gone, or has been stopped for longer than the heartbeat timeout."""
        return self.frames.disconnected()

    def close(self) -> None:
        """Close the link; queued messages are dropped."""
        self.frames.close()
        if self.beside is not None:
            self.beside.close()
