"""Table 1 of the survey as printed, to hold what is derived from running compositions against."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources

import msgspec

COLUMNS = ("parallelism", "optimisation", "scheduling", "exchange", "topology")


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of the survey's table; fields as those of `System.row`."""

    system: str
    parallelism: str
    optimisation: str
    scheduling: str
    exchange: str
    topology: str


@cache
def table_1() -> tuple[Row, ...]:
    """Langer et al. (2020), table 1, in its order."""
    text = resources.files("flockstep.systems").joinpath("table_1.toml").read_text("utf-8")
    return tuple(msgspec.convert(tomllib.loads(text)["row"], list[Row]))


def differences(derived: Mapping[str, str], published: Row) -> dict[str, tuple[str, str]]:
    """Column → (derived, published) where a system's derived row is not the published one.

    Model parallelism that the survey has and that is not here yet differs.
    """
    found = {column: (derived[column], str(getattr(published, column))) for column in COLUMNS}
    return {
        column: pair
        for column, pair in found.items()
        if not (_parallel(*pair) if column == "parallelism" else _same(*pair))
    }


def _parallel(derived: str, published: str) -> bool:
    return set(derived.replace(" + ", ", ").split(", ")) == set(published.split(" + "))


def _same(derived: str, published: str) -> bool:
    """What differs between modes, in any order; each one of those that the survey leaves open."""
    here, there = derived.split("; "), [text.split(" or ") for text in published.split("; ")]
    return len(here) == len(there) and all(any(part in options for part in here) for options in there)
