"""The catalogue of systems, read from `table.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import resources

import msgspec

from flockstep.errors import CompositionError, UnknownName
from flockstep.strategies.base import Cell, Strategy

NOT_YET = "not yet"
"""What a system's row says of what cannot be composed here so far."""


class Mode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way in which a system runs."""

    strategy: str
    """The composition, as an expression."""
    name: str = ""
    """What the system calls it; the first mode is the default and needs none."""
    listed: bool = True
    """It counts for the system's row of the table; others are options that the survey's row leaves out."""


class System(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One system: who wrote it, what it does, and the compositions that do it here."""

    name: str
    citation: str
    rule: str
    """What it does, in a sentence or two."""
    modes: tuple[Mode, ...] = ()
    """The default first; none where it only splits the model, which is not here yet."""
    splits_model: bool = False
    """The published system can also (or only) split one model over machines."""
    differs: str = ""
    """Where the composition is not the published system."""

    def expression(self, mode: str = "") -> str:
        """The composition of a mode ("": the default).

        Raises:
            CompositionError: it has none.
            UnknownName: it has others.
        """
        if not self.modes:
            raise CompositionError(
                f"{self.name} splits the model over machines, which flockstep cannot do yet; choose a system that "
                "is data-parallel, see flockstep systems"
            )
        if not mode:
            return self.modes[0].strategy
        for known in self.modes:
            if key(known.name) == key(mode):
                return known.strategy
        raise UnknownName.among(f"mode of {self.name}", mode, [known.name for known in self.modes])

    @property
    def parallelism(self) -> str:
        """What of it can run here, and what not yet."""
        here = ["DP"] if self.modes else []
        return ", ".join([*here, *([f"MP: {NOT_YET}"] if self.splits_model else [])])

    def cells(self) -> list[Cell]:
        """Where each listed mode stands in the taxonomy, derived from its composition."""
        found = [Strategy.parse(mode.strategy).cell for mode in self.modes if mode.listed]
        return [cell for cell in found if cell is not None]

    def row(self) -> dict[str, str]:
        """Its row of the table: what its modes have in common once, what differs side by side.

        A system that runs both synchronously and asynchronously counts as bounded asynchronous, for that covers both
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
            "optimisation": _joined(cell.optimisation for cell in cells),
            "scheduling": "bounded async" if both else _joined(kinds),
            "exchange": _joined(exchanges),
            "topology": _joined(cell.topology for cell in cells),
        }


@cache
def systems() -> tuple[System, ...]:
    """All of them, in alphabetical order."""
    text = resources.files("flockstep.systems").joinpath("table.toml").read_text("utf-8")
    rows = msgspec.convert(tomllib.loads(text)["system"], list[System])
    return tuple(sorted(rows, key=lambda system: system.name.lower()))


def system(name: str) -> System:
    """The system of that name, whatever its case, spaces and hyphens.

    Raises:
        UnknownName: there is none; the nearest name is in the message.
    """
    for known in systems():
        if key(known.name) == key(name):
            return known
    raise UnknownName.among("system", name, [known.name for known in systems()])


def expression(name: str) -> str | None:
    """The composition that a system's name stands for, or name and mode as in "MXNet: dist_async"; None: no system."""
    name, _, mode = name.partition(":")
    found = [known for known in systems() if key(known.name) == key(name)]
    return found[0].expression(mode.strip()) if found else None


def names() -> list[str]:
    """How they are called."""
    return [known.name for known in systems()]


def key(name: str) -> str:
    """The name without what people write differently."""
    return "".join(c for c in name.lower() if c.isalnum())


def _joined(values: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(values)) or NOT_YET
