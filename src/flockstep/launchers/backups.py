"""Determines which process of a replicated server continues when another process of the server is lost."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from flockstep.messages import Address, node_name
from flockstep.nodes import Cluster


@dataclass(frozen=True)
class Replaced:
    """Outcome of the loss of a process of a replicated server: another process of the server continues."""

    text: str
    """Sentence about the event for the user and the record."""
    promoted: Address | None
    """Address of the backup that takes the place of the lost process; None if the lost process was a backup."""


def is_replaced(cluster: Cluster, address: Address, gone: Set[Address]) -> bool:
    """Return whether another process of the server continues after the loss of process `address`; `gone` holds all lost
    processes, including this one.
    """
    return address < 0 and not set(cluster.chain(cluster.logical(address))) <= gone


def replaced(cluster: Cluster, address: Address, gone: Set[Address], reason: str) -> Replaced:
    """Return which process of the server continues after the loss of process `address`; `is_replaced` must be true."""
    chain = cluster.chain(cluster.logical(address))
    leads = next(one for one in chain if one not in gone)
    if chain.index(leads) > chain.index(address):
        return Replaced(f"{reason}; {node_name(leads)}, its backup, continues in its place", leads)
    return Replaced(f"{reason}; {node_name(leads)}, whose backup it was, continues", None)
