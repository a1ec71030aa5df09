"""The ways that share a layer, as a group of members of collectives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flockstep.drivers.part_program import PartRun, resumed
from flockstep.messages import PART, Address, AnyNote, Array, Mailbox, Message, Wanted, frozen
from flockstep.nodes import Hosts
from flockstep.programs import Rendezvous, SharedArrays


class Ways:
    """One way as a member of the group of all ways that share its layers; the group sums arrays by messages between the
    ways.
    """

    def __init__(self, parts: Sequence[int], run: PartRun, mailbox: Mailbox) -> None:
        """Create the member that `run` places in the group of `parts`; messages arrive in `mailbox`."""
        self.rank, self.workers, self.random = parts.index(run.number), len(parts), run.random(run.taken)
        self.hosts: Hosts = (tuple(range(len(parts))),)
        self.rendezvous: Rendezvous | None = None
        self.shared = SharedArrays()
        self._parts, self._run, self._mailbox = parts, run, mailbox

    def send(self, to: Address, tag: str, array: Array | None = None, note: AnyNote | None = None) -> None:
        """Send a message to another way of the stage; the array is copied."""
        copy = None if array is None else frozen(array)
        self._run.send(self._parts[to], Message(PART + self._run.number, tag, copy, {} if note is None else note))

    def send_all(
        self, to: Iterable[Address], tag: str, array: Array | None = None, note: AnyNote | None = None
    ) -> None:
        """Send one message to each of several ways."""
        for rank in to:
            self.send(rank, tag, array, note)

    async def receive(self, tag: str, source: Address) -> Message:
        """Return the next message with the given tag from another way of the stage."""
        message: Message = await resumed(Wanted(tag, PART + self._parts[source]))
        self.require_all(source)
        return message

    async def receive_array(self, tag: str, source: Address, into: Array | None = None) -> Array:
        """Return the array of the next message with the given tag from another way, stored in `into` if `into` is
        given.
        """
        array = (await self.receive(tag, source)).payload
        if into is None:
            return array
        into[:] = array
        return into

    def require_all(self, source: Address) -> None:
        """Check that no message from another way was lost."""
        self._mailbox.require_all(PART + self._parts[source])
