"""Formats numbers in the same way everywhere (12.3 s, 4.1 MB, 83 %), and breaks text into lines."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flockstep.records.summary import Summary

NONE = "–"


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with three significant digits; an exponent appears only for very large and very small numbers."""
    if value is None:
        return NONE
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1e9 or size < 1e-3:
        return f"{value:.{digits - 1}e}"
    if size >= 1e6:
        value = float(f"{value:.{digits - 1}e}")
    decimals = max(0, digits - 1 - math.floor(math.log10(size)))
    return f"{value:,.{decimals}f}"


def seconds(value: float | None) -> str:
    """Format a duration in s, ms or µs."""
    if value is None:
        return NONE
    if value == 0 or value >= 1:
        return f"{number(value)} s"
    return f"{number(value * 1e3)} ms" if value >= 1e-3 else f"{number(value * 1e6)} µs"


def size(value: float | None) -> str:
    """Format a number of bytes in B, kB, MB or GB (powers of 1000)."""
    if value is None:
        return NONE
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{number(value / scale)} {unit}"
    return f"{number(value)} B"


def share(value: float | None) -> str:
    """Format a share in percent; only a share of exactly 0 or 1 is shown as 0 % or 100 %."""
    if value is None:
        return NONE
    percent = value * 100
    if percent in (0, 100) or 1 <= percent <= 99:
        return f"{percent:.0f} %"
    if percent >= 100:
        return f"{percent:.1f} %"
    return f"{min(percent, 99.9):.1f} %" if percent >= 0.1 else "< 0.1 %"


def metric(value: float | None) -> str:
    """Format a metric, such as an accuracy: four decimals below 10, three significant digits above."""
    return NONE if value is None else f"{value:.4f}" if abs(value) < 10 else number(value)


def times(value: float) -> str:
    """Format a ratio with two significant digits, for example "3.2 times"."""
    return f"{number(value, 2)} times"


def listed(parts: Sequence[str]) -> str:
    """Join texts with commas, and the last one with "and"; an empty text without any."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def staleness(summary: Summary) -> str:
    """Format the mean and the maximum staleness of a run."""
    if summary.staleness_mean is None:
        return NONE
    return f"{number(summary.staleness_mean, 2)}/{summary.staleness_max}"


def pieces(text: str) -> list[str]:
    """Return the parts of `text` that a line break may not divide; a part ends after a space, "(", "," or "="."""
    return re.findall(r"[^\s(,=]*[(,=]+\s*|[^\s(,=]+\s*|\s+", text)


def lines(text: str, width: int) -> list[str]:
    """Break `text` into lines of at most `width` characters, never inside a word.

    Lines end after spaces; an expression without spaces is broken only if it is longer than `width`. A word longer than
    `width` has its own line.
    """
    broken = []
    for line in text.split("\n"):
        broken.append("")
        for chunk in re.findall(r"\S+\s*|\s+", line):
            for piece in [chunk] if len(chunk.rstrip()) <= width else pieces(chunk):
                if broken[-1] and len(broken[-1]) + len(piece.rstrip()) > width:
                    broken.append("")
                broken[-1] += piece
    return [line.rstrip() for line in broken]
