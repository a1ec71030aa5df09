"""The catalog of published systems, read from `table.toml`."""

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
"""Expression of the strategy that runs a single replica, for modes that name no strategy."""


class Mode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One mode in which a published system runs: a strategy between replicas, a partition of each replica, or both."""

    strategy: str = ""
    """The mode's strategy, as an expression; empty if there is a single replica, which all workers hold together."""
    name: str = ""
    """Name that the system gives the mode. The first mode is the default and needs no name."""
    partition: str = "none"
    """The mode's partition of each replica over several workers, as an expression."""
    listed: bool = True
    """Whether the mode counts for the system's row in table 1 of Langer et al. (2020)."""

    @property
    def runs(self) -> str:
        """The strategy that runs the mode. With a single replica, any strategy can run the mode, because replicas
        exchange no messages.
        """
        return self.strategy or ONE_REPLICA

    @property
    def taxonomy_entry(self) -> TaxonomyEntry | None:
        """The mode's entry in the taxonomy: the entry of the strategy, or of the partition if there is a single
        replica.
        """
        if self.strategy:
            return Strategy.parse(self.strategy).taxonomy_entry
        partition = Partition.parse(self.partition)
        return TaxonomyEntry("central", "async" if partition.delays else "sync", "none", partition.addressing)


class System(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A published system: its authors, its algorithm, and the compositions that implement the system in flockstep."""

    name: str
    citation: str
    algorithm: str
    """Description of the system's algorithm in one or two sentences."""
    modes: tuple[Mode, ...]
    """The system's modes, with the default mode first."""
    differs: str = ""
    """Differences between flockstep's composition and the published system."""

    def expression(self, mode: str = "") -> str:
        """Return the composition of a mode as an expression; "" is the default mode.

        Raises:
            CompositionError: the mode needs a partition in addition to a strategy.
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
        """The kinds of parallelism that the system's modes use."""
        here = ["DP"] if any(mode.strategy for mode in self.modes) else []
        if any(Partition.parse(mode.partition).splits_model for mode in self.modes):
            here.append("MP")
        return ", ".join(here)

    def cells(self) -> list[TaxonomyEntry]:
        """Return the taxonomy entry of each mode that counts for the system's row, derived from the mode's
        composition.
        """
        found = [mode.taxonomy_entry for mode in self.modes if mode.listed]
        return [cell for cell in found if cell is not None]

    def row(self) -> dict[str, str]:
        """Return the system's row in table 1 of Langer et al. (2020), derived from its modes: properties that all modes
        share appear once, differing properties side by side.

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
    """Return the system with the given name. Case, spaces and hyphens are ignored.

    Raises:
        UnknownName: there is no such system; the message has the nearest name.
    """
    for known in systems():
        if key(known.name) == key(name):
            return known
    raise UnknownName.among("system", name, [known.name for known in systems()])


def expression(name: str) -> str | None:
    """Return the composition for the name of a system, or for a system and a mode as in "MXNet: dist_async"; None for
    other names.
    """
    name, _, mode = name.partition(":")
    found = [known for known in systems() if key(known.name) == key(name)]
    return found[0].expression(mode.strip()) if found else None


def names() -> list[str]:
    """Return the names of all systems."""
    return [known.name for known in systems()]


def key(name: str) -> str:
    """Return the name in lower case and reduced to letters and digits, for comparisons of names."""
    return "".join(c for c in name.lower() if c.isalnum())


def _joined(values: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(values))
