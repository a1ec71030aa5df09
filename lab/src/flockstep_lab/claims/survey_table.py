"""Table 1 of the survey by Langer et al. (2020) as printed, for comparison with the rows derived from flockstep's
compositions.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources

import msgspec

COLUMNS = ("parallelism", "optimization", "scheduling", "exchange", "topology")


class SurveyRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of table 1 of Langer et al. (2020), with the fields of `System.row`."""

    system: str
    parallelism: str
    optimization: str
    scheduling: str
    exchange: str
    topology: str


@cache
def table_1() -> tuple[SurveyRow, ...]:
    """Return the rows of table 1 of Langer et al. (2020), in the table's order."""
    text = resources.files("flockstep_lab.claims").joinpath("survey_table.toml").read_text("utf-8")
    return tuple(msgspec.convert(tomllib.loads(text)["row"], list[SurveyRow]))


def differences(derived: Mapping[str, str], published: SurveyRow) -> dict[str, tuple[str, str]]:
    """Return the columns in which a system's derived row differs from the published row: column → (derived,
    published).
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
    """Whether the entries agree, with modes in any order, and each mode being one of those the survey leaves open."""
    here, there = derived.split("; "), [text.split(" or ") for text in published.split("; ")]
    return len(here) == len(there) and all(any(part in options for part in here) for options in there)
