"""The catalog of systems, read from `table.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import resources

import msgspec

from flockstep.errors import CompositionError, UnknownName
from flockstep.partitions.base import Partition
from flockstep.strategies.base import Strategy, TaxonomyEntry

ONE_REPLICA = "all_reduce"
"""Strategy with which a single replica is run, if a mode names no strategy."""


class Mode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One mode in which a system runs: a strategy between replicas, a partition of each replica, or both."""

    strategy: str = ""
    """The composition, as an expression; empty if there is a single replica, which its workers hold together."""
    name: str = ""
    """Name that the system gives the mode; the first mode is the default and needs no name."""
    partition: str = "none"
    """How the mode splits each replica over workers, as an expression."""
    listed: bool = True
    """Whether the mode counts for the system's row of the table; the survey's row leaves other modes out."""

    @property
    def runs(self) -> str:
        """The strategy that runs the mode; with a single replica, any strategy does, because nothing is exchanged."""
        return self.strategy or ONE_REPLICA

    @property
    def taxonomy_entry(self) -> TaxonomyEntry | None:
        """The mode's cell in the taxonomy: that of the strategy, or of the partition if there is a single replica."""
        if self.strategy:
            return Strategy.parse(self.strategy).taxonomy_entry
        partition = Partition.parse(self.partition)
        return TaxonomyEntry("central", "async" if partition.delays else "sync", "none", partition.addressing)


class System(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One system: its authors, its algorithm, and the compositions that implement it in flockstep."""

    name: str
    citation: str
    algorithm: str
    """The system's algorithm in one or two sentences."""
    modes: tuple[Mode, ...]
    """The modes, with the default mode first."""
    differs: str = ""
    """Differences between the composition and the published system."""

    def expression(self, mode: str = "") -> str:
        """Return the composition of a mode; "" is the default mode.

        Raises:
            CompositionError: the mode needs a partition, which is no strategy.
            UnknownName: the system has no mode of that name.
        """
        found = [known for known in self.modes if key(known.name) == key(mode)] if mode else [self.modes[0]]
        if not found:
            raise UnknownName.among(f"mode of {self.name}", mode, [known.name for known in self.modes])
        known = found[0]
        if known.partition != "none":
            name = f"{self.name}: {known.name}" if known.name else self.name
            raise CompositionError(
                f"{name} is a strategy and a partition; write --strategy '{known.runs}' --partition '{known.partition}'"
            )
        return known.strategy

    @property
    def parallelism(self) -> str:
        """The kinds of parallelism of the system's modes."""
        here = ["DP"] if any(mode.strategy for mode in self.modes) else []
        if any(Partition.parse(mode.partition).splits_model for mode in self.modes):
            here.append("MP")
        return ", ".join(here)

    def cells(self) -> list[TaxonomyEntry]:
        """Return the taxonomy cell of each listed mode, derived from its composition."""
        found = [mode.taxonomy_entry for mode in self.modes if mode.listed]
        return [cell for cell in found if cell is not None]

    def row(self) -> dict[str, str]:
        """Return the system's row of the table: properties that all modes share appear once, differing properties side
        by side.

        A system that runs both synchronously and asynchronously counts as bounded asynchronous, which covers both
        (Langer et al. 2020, section 4.2).
        """
        cells = self.cells()
        kinds = list(dict.fromkeys(cell.scheduling for cell in cells))
        both = "sync" in kinds and len(kinds) > 1
        exchanges = dict.fromkeys(
            f"async: {cell.exchange}" if both and cell.scheduling != "sync" else cell.exchange for cell in cells
        )
        return {
            "system": self.name,
            "parallelism": self.parallelism,
            "optimization": _joined(cell.optimization for cell in cells),
            "scheduling": "bounded async" if both else _joined(kinds),
            "exchange": _joined(exchanges),
            "topology": _joined(cell.topology for cell in cells),
        }


@cache
def systems() -> tuple[System, ...]:
    """Return all systems, in alphabetical order."""
    text = resources.files("flockstep.systems").joinpath("table.toml").read_text("utf-8")
    rows = msgspec.convert(tomllib.loads(text)["system"], list[System])
    return tuple(sorted(rows, key=lambda system: system.name.lower()))


def system(name: str) -> System:
    """Return the system with the given name; case, spaces and hyphens are ignored.

    Raises:
        UnknownName: there is no such system; the message has the nearest name.
    """
    for known in systems():
        if key(known.name) == key(name):
            return known
    raise UnknownName.among("system", name, [known.name for known in systems()])


def expression(name: str) -> str | None:
    """Return the composition for a system's name, or for system and mode as in "MXNet: dist_async"; None for other
    names.
    """
    name, _, mode = name.partition(":")
    found = [known for known in systems() if key(known.name) == key(name)]
    return found[0].expression(mode.strip()) if found else None


def names() -> list[str]:
    """Return the names of all systems."""
    return [known.name for known in systems()]


def key(name: str) -> str:
    """Return the name in lower case, reduced to letters and digits."""
    return "".join(c for c in name.lower() if c.isalnum())


def _joined(values: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(values))
