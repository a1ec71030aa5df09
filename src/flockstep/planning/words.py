"""A plan as text: the same cells in the terminal and on the page."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flockstep.planning.criteria import NEVER, is_synchronous, lateness
from flockstep.planning.plan import Outlook, combines
from flockstep.planning.prospect import Prospect
from flockstep.planning.scaling import Curve
from flockstep.report.words import NONE, number, seconds, share, size

HEADINGS = (
    "strategy",
    "worth",
    "samples/s",
    "step",
    "computes",
    "sends",
    "server",
    "late",
    "at most",
    "memory",
    "from",
)

LITTLE = 1e-3
"""Worth below which it does not matter how little."""
_NUMBER = re.compile(r"(?<![\w.])(?:\d+\.\d+(?:e[+-]?\d+)?|\d+e[+-]?\d+)(?!\w)")
"""A float, in an expression."""
_LONG = 6
"""Figures up to which one without an exponent is left as it is."""


def short(text: str) -> str:
    """An expression with its numbers written as briefly as they can be: 4000000000.0 as 4e9."""
    return _NUMBER.sub(lambda found: _brief(found[0]), text)


def _brief(text: str) -> str:
    if "e" not in text and len(text) <= _LONG:
        return text
    whole, _, power = f"{float(text):e}".partition("e")
    brief = f"{whole.rstrip('0').rstrip('.')}e{int(power)}"
    return brief if len(brief) < len(text) and float(brief) == float(text) else text


def many(count: int, noun: str, plural: str | None = None) -> str:
    """So many things: "1 worker", "1,024 workers"; `plural` where an s does not make it."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def as_much(ratio: float, what: str = "many") -> str:
    """A ratio: "3.2 times as many", "as many", "85 % as many"."""
    if 0.995 <= ratio < 1.005:
        return f"as {what}"
    if ratio < 1:
        return f"{share(ratio)} as {what}"
    return f"{number(ratio, 3 if ratio < 1.05 else 2)} times as {what}"


def late(outlook: Outlook, found: Prospect) -> float | None:
    """Versions by which its updates are late in the mean; None where it has none, and all wait for each other."""
    if found.staleness is not None or found.strategy is None or not combines(found):
        return found.staleness
    return None if is_synchronous(found.strategy.cell, found.strategy.traits) else lateness(found, outlook.site)


def _late(outlook: Outlook, found: Prospect) -> str:
    versions = late(outlook, found)
    return NONE if versions is None else number(versions, 2) if versions < NEVER else "ever more"


def exposed(exposure: float | None) -> str:
    """How much of the slowest worker's delay everyone takes on: over all of it where it reaches into later steps."""
    if exposure is None:
        return NONE
    return "over 100 %" if exposure >= 1.005 else share(exposure)


def worth_of(worth: float | None) -> str:
    """What a strategy is worth, as text."""
    return f"< {LITTLE:g}" if worth is not None and worth < LITTLE else number(worth)


def cells(outlook: Outlook, found: Prospect, worth: float) -> tuple[str, ...]:
    """A row of the table; `worth`: how many times as quickly as one worker it is taken to advance."""
    most = found.staleness_most
    return (
        short(found.name),
        worth_of(worth),
        number(found.samples_per_second),
        seconds(found.seconds),
        share(found.utilisation),
        size(found.sent),
        size(found.server_bytes) if found.server_bytes else NONE,
        _late(outlook, found),
        NONE if most is None else str(most),
        size(found.memory),
        found.source,
    )


def scaling_sentence(one: Curve) -> str:
    """Where a strategy begins and stops to pay."""
    name = short(one.name)
    if one.beats_one_from is None:
        return f"{name} is never worth more than one worker alone"
    last = "on" if one.beats_one_to == one.workers[-1] else f"up to {one.beats_one_to:,}"
    begins = f"{name} is worth more than one worker from {many(one.beats_one_from, 'worker')} {last}"
    if one.pays_to <= 1:
        return f"{begins}; doubling them does not pay"
    far = f"as far as {one.pays_to:,}" if one.pays_to == one.workers[-1] else f"up to {many(one.pays_to, 'worker')}"
    return f"{begins}; doubling them pays {far}"


def scaling(curves: Sequence[Curve], excluded: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """How strategies scale, those that are ruled out marked as such."""
    out = {name for name, _ in excluded}
    return tuple(f"{scaling_sentence(one)}{' (ruled out)' if one.name in out else ''}" for one in curves)


def ruled_out(excluded: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Strategies that do not meet the needs, by reason."""
    return tuple(
        f"{', '.join(short(name) for name, why in excluded if why == reason)}: {reason}"
        for reason in dict.fromkeys(why for _, why in excluded)
    )


def unplanned(outlook: Outlook) -> tuple[str, ...]:
    """What is not in the table, and why."""
    return tuple(f"{short(name)}: {why}" for name, why in outlook.refused)


RATES = {"higher": "higher", "likely": "near one worker's", "lower": "lower"}
"""OptLR in words."""
TABLE_2 = (
    "strategy",
    "technique",
    "alike data",
    "learning rate",
    "late",
    "hyper-parameters",
    "waits for slowest",
    "deaths survived",
    "reproducible",
    "departures",
)
"""Of Langer et al. (2020): R_LBD, OptLR, COCC, CAHP, RSOI (two columns), ERB, and how many departures were counted."""


def row_of_table_2(outlook: Outlook, found: Prospect) -> tuple[str, ...]:
    """A strategy's criteria."""
    row = outlook.criteria(found)
    return (
        short(found.name),
        row.technique,
        "needed" if row.balanced_data else "not needed",
        RATES[row.learning_rate],
        _late(outlook, found),
        str(row.hyper_parameters),
        exposed(row.exposure),
        f"{row.survives:,}",
        row.reproducible,
        str(len(outlook.departures(found))),
    )
