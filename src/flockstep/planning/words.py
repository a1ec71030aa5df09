"""Phrases that the tables and sentences of plans share."""

from __future__ import annotations

import re

from flockstep.planning.step_prediction import StepPrediction
from flockstep.report.formatting import NONE, number, seconds, share

_NUMBER = re.compile(r"(?<![\w.])(?:\d+\.\d+(?:e[+-]?\d+)?|\d+e[+-]?\d+)(?!\w)")
"""Pattern of a float in an expression."""


def short(text: str) -> str:
    """Return an expression with its numbers in their shortest form: 4000000000.0 becomes 4e9."""
    return _NUMBER.sub(lambda found: _brief(found[0]), text)


def _brief(text: str) -> str:
    if "e" not in text and len(text) <= 6:
        return text
    whole, _, power = f"{float(text):e}".partition("e")
    brief = f"{whole.rstrip('0').rstrip('.')}e{int(power)}"
    return brief if len(brief) < len(text) and float(brief) == float(text) else text


def many(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun: "1 worker", "1,024 workers"; `plural` is the plural of nouns that do not take an
    s.
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def as_much(ratio: float, what: str = "many") -> str:
    """Return a ratio as text, for example "3.2 times as many", "as many" or "85 % as many"."""
    if 0.995 <= ratio < 1.005:
        return f"as {what}"
    if ratio < 1:
        return f"{share(ratio)} as {what}"
    return f"{number(ratio, 3 if ratio < 1.05 else 2)} times as {what}"


def exposed(exposure: float | None) -> str:
    """Return, as text, the share of the slowest worker's delay that all workers suffer.

    The share is above 100 % if the delay also affects later steps.
    """
    if exposure is None:
        return NONE
    return "over 100 %" if exposure >= 1.005 else share(exposure)


def ranged(found: StepPrediction) -> str:
    """Return the seconds of a predicted step as text, with their range if it is at least 0.5 %."""
    return seconds(found.seconds) + (f" ± {share(found.range)}" if found.range >= 0.005 else "")
