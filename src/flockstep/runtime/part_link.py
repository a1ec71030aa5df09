"""A bus for a node of a split model, which reaches the node's own group and the parts of its own replica."""

from __future__ import annotations

import msgspec

from flockstep.errors import PeerLost
from flockstep.messages import LAUNCHER, PART, Address, Array, Message, Wanted
from flockstep.runtime.member import Member, NodeLost
from flockstep.runtime.part_group import PartGroup


class PartLink:
    """The bus of the run, as a node of one part group sees it.

    Nodes of the group have the addresses that they have in the group; part i of the worker's own replica has the
    address `PART` + i; no other node can be reached.
    """

    def __init__(self, member: Member, group: PartGroup, survives: bool):
        """`survives`: whether the strategy continues without workers that are lost."""
        self.group, self.traffic, self.address = group, member.bus.traffic, member.bus.address
        self._member, self._bus, self._survives = member, member.bus, survives
        self._me = member.node_spec.address
        self._first = self._me - group.part
        """Address in the run of part 0 of this worker's replica."""

    def receive(self, seconds: float | None, also: int | None = None, wanted: Wanted | None = None) -> Message | None:
        """Return the next message within the given seconds, or None. Raise `PeerLost` as `within` does."""
        if wanted is not None and wanted.source is not None:
            wanted = msgspec.structs.replace(wanted, source=self._outside(wanted.source))
        while (message := self._member.receive(seconds, also, wanted)) is not None:
            if (found := self.within(message)) is not None:
                return found
        return None

    def later(self, seconds: float, message: Message) -> None:
        """Let a message of this node to itself arrive after so many seconds."""
        self._bus.later(seconds, msgspec.structs.replace(message, source=self.group.outside(message.source)))

    def within(self, message: Message) -> Message | None:
        """Return a message of the run with its addresses translated to those of the group; None if the message concerns
        another group. Raise `PeerLost` if a node of another group is lost that this node needs.
        """
        if message.source != LAUNCHER:
            message.source = self._inside(message.source)
            return message
        if message.tag not in ("lost", "left"):
            return message
        address = int(message.note.address if isinstance(message.note, NodeLost) else message.note["address"])
        inside = self.group.inside(address)
        if isinstance(message.note, NodeLost):
            if inside is None and (address < 0 or not self._survives):
                raise PeerLost(message.note.reason)
            if inside is not None:
                view = self.group.view(message.note.view)
                message.note = msgspec.structs.replace(message.note, address=inside, view=view)
        elif inside is not None:
            message.note = {**message.note, "address": inside}
        return None if inside is None else message

    def _outside(self, address: Address) -> Address:
        return self._first + address - PART if address >= PART else self.group.outside(address)

    def _inside(self, address: Address) -> Address:
        inside = self.group.inside(address)
        return PART + address - self._first if inside is None else inside

    def disconnect(self, peer: Address) -> None:
        """Close the connection to a node that was lost."""
        self._bus.disconnect(self._outside(peer))

    def reachable(self, peer: Address) -> bool:
        """Return whether the connection to the node is established."""
        return self._bus.reachable(self._outside(peer))

    def broken(self, seconds: float) -> set[Address]:
        """Nodes of the group and of this worker's replica whose connections broke `seconds` ago or earlier."""
        known = range(self._first, self._first + self.group.parts) if self._me >= 0 else ()
        broken = self._bus.broken(seconds)
        return {self._inside(one) for one in broken if one in known or self.group.inside(one) is not None}

    def why_broken(self, peer: Address) -> str:
        """Return the reason why the connection to a node ended."""
        return self._bus.why_broken(self._outside(peer))

    def send(self, to: Address, message: Message) -> None:
        """Send a message to a node without waiting, as `StreamBus.send` does."""
        message.source = self._me
        self._bus.send(self._outside(to), message)

    def copy_for_sending(self, array: Array) -> Array:
        """Return a read-only copy of the array, as `StreamBus.copy_for_sending` does."""
        return self._bus.copy_for_sending(array)
