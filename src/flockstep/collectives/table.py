"""Measured times of collectives in a TOML file, as `flockstep bench collectives --save FILE` writes it.

The file has one table per measurement, in any order:

    [[measured]]
    collective = "double_tree(chunks=8)"    # an expression
    workers = 4
    bytes = 1048576                         # of the array, >= 0
    seconds = 0.0021                        # of one all-reduce, > 0

Every host of a run needs the same file.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from flockstep.errors import ConfigurationError


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The seconds that one all-reduce of `bytes` bytes among `workers` workers took."""

    collective: str
    workers: Annotated[int, Meta(ge=1)]
    bytes: Annotated[int, Meta(ge=0)]
    seconds: Annotated[float, Meta(gt=0, lt=1e9)]


def write_table(path: Path, rows: Iterable[Measured]) -> None:
    """Write measurements to a TOML file."""
    pieces = []
    for row in rows:
        text = row.collective.replace("\\", "\\\\").replace('"', '\\"')
        numbers = f"workers = {row.workers}\nbytes = {row.bytes}\nseconds = {float(row.seconds)!r}\n"
        pieces.append(f'[[measured]]\ncollective = "{text}"\n{numbers}')
    path.write_text("\n".join(pieces), encoding="utf-8")


@functools.lru_cache(maxsize=16)
def read_table(path: str) -> tuple[Measured, ...]:
    """Return the measurements in a file.

    Raises:
        ConfigurationError: the file cannot be read, has another format, or has no measurements.
    """
    way_out = "write a table with: flockstep bench collectives --save FILE"
    try:
        data: Any = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"cannot read the table of collectives {path}: {error}; {way_out}") from None
    rows = data.get("measured")
    if not isinstance(rows, list) or not rows:
        raise ConfigurationError(f"{path} has no [[measured]] tables; {way_out}")
    try:
        return tuple(msgspec.convert(rows, list[Measured]))
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"a row of {path} has a missing or wrong value: {error}; {way_out}") from None


def nearest(rows: Iterable[Measured], workers: int, nbytes: int) -> list[Measured]:
    """Return one measurement of each collective: with the number of workers nearest to `workers` and, among these, with
    the nearest size, both on a logarithmic scale.

    Of equally near rows, the row with the smaller number of workers and the smaller size is chosen. Collectives are
    ordered by their text, so that all workers agree.
    """
    rows = list(rows)
    known = min(sorted({row.workers for row in rows}), key=lambda n: _distance(n, workers))
    best: dict[str, Measured] = {}
    for row in sorted((r for r in rows if r.workers == known), key=lambda r: (r.collective, r.bytes, r.seconds)):
        kept = best.get(row.collective)
        if kept is None or _distance(row.bytes, nbytes) < _distance(kept.bytes, nbytes):
            best[row.collective] = row
    return list(best.values())


def _distance(a: int, b: int) -> float:
    """Return the distance between two sizes, in log scale; an empty array counts as one byte."""
    return abs(math.log(max(a, 1)) - math.log(max(b, 1)))
