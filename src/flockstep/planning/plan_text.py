"""Formats a plan as text. The tables of the terminal and of the HTML page have the same cells."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flockstep.planning.criteria import NEVER, is_synchronous, lateness
from flockstep.planning.plan import Outlook, combines
from flockstep.planning.step_prediction import StepPrediction
from flockstep.report.formatting import NONE, number, seconds, share, size
from flockstep.report.terminal import TableColumn

COLUMNS = (
    TableColumn("strategy", text=True),
    TableColumn(
        "speed-up",
        note="speed-up: speed relative to one worker: measured in trials, otherwise predicted from the samples per "
        "second and the number of samples that a formula assumes.",
    ),
    TableColumn("samples/s", rank=2, note="samples/s: samples per second of all workers together."),
    TableColumn(
        "step",
        rank=3,
        note="step: time between two gradients of a worker; ± is two standard errors of the rehearsal's mean, also of "
        "samples/s.",
    ),
    TableColumn(
        "computes",
        rank=4,
        note="computes: share of a step spent computing; the rest of the step is communication and waiting.",
    ),
    TableColumn("sends", rank=5, note="sends: bytes that a worker sends per step."),
    TableColumn("server", rank=8, note="server: bytes per step through the busiest server."),
    TableColumn(
        "staleness",
        rank=7,
        note="staleness: mean number of updates applied between reading the parameters and applying the gradient.",
    ),
    TableColumn("max", rank=9, note="max: largest staleness in the rehearsal."),
    TableColumn(
        "memory",
        rank=6,
        note="memory: bytes on a worker for parameters, gradients, optimizer, strategy, and the activations of a batch "
        "if the layers are known.",
    ),
)
"""Columns of the table of predictions."""
HEADINGS = tuple(one.heading for one in COLUMNS)
LITTLE = 1e-3
"""Speed-up below which the table shows only an upper limit of the speed-up."""
_NUMBER = re.compile(r"(?<![\w.])(?:\d+\.\d+(?:e[+-]?\d+)?|\d+e[+-]?\d+)(?!\w)")
"""Pattern of a float in an expression."""
_LONG = 6
"""Largest number of characters of a number that is left without an exponent."""


def short(text: str) -> str:
    """Return an expression with its numbers in their shortest form: 4000000000.0 becomes 4e9."""
    return _NUMBER.sub(lambda found: _brief(found[0]), text)


def _brief(text: str) -> str:
    if "e" not in text and len(text) <= _LONG:
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


def late(outlook: Outlook, found: StepPrediction) -> float | None:
    """Return the mean staleness of a strategy's updates in versions; None if the strategy has no versions or all
    workers wait for each other.
    """
    if found.staleness is not None or found.strategy is None or not combines(found):
        return found.staleness
    return (
        None if is_synchronous(found.strategy.taxonomy_entry, found.strategy.traits) else lateness(found, outlook.site)
    )


def _late(outlook: Outlook, found: StepPrediction) -> str:
    versions = late(outlook, found)
    return NONE if versions is None else number(versions, 2) if versions < NEVER else "unbounded"


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


def speedup_of(speedup: float | None) -> str:
    """Return a strategy's predicted speed-up as text."""
    return f"< {LITTLE:g}" if speedup is not None and speedup < LITTLE else number(speedup)


def cells(outlook: Outlook, found: StepPrediction, speedup: float) -> tuple[str, ...]:
    """Return the table row of a prediction. `speedup` is the strategy's predicted speed relative to one worker."""
    most = found.staleness_most
    return (
        short(found.name),
        speedup_of(speedup),
        number(found.samples_per_second),
        ranged(found),
        share(found.utilization),
        size(found.sent_bytes),
        size(found.server_bytes) if found.server_bytes else NONE,
        _late(outlook, found),
        NONE if most is None else str(most),
        size(found.memory),
    )


def ruled_out(excluded: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return the reasons why strategies do not meet the requirements, one sentence for each reason."""
    return tuple(
        f"{', '.join(short(name) for name, why in excluded if why == reason)}: {reason}"
        for reason in dict.fromkeys(why for _, why in excluded)
    )


def unplanned(outlook: Outlook) -> tuple[str, ...]:
    """Return the reasons why strategies are not in the table, one sentence for each strategy."""
    return tuple(why if why.startswith(name) else f"{short(name)}: {why}" for name, why in outlook.refused)


RATES = {"higher": "higher", "likely": "near one worker's", "lower": "lower"}
"""Value of the criterion OptLR (best learning rate) → text of the value in a table."""
TABLE_2 = (
    "strategy",
    "technique",
    "similar data",
    "learning rate",
    "staleness",
    "hyper-parameters",
    "waits for slowest",
    "deaths survived",
    "reproducible",
    "differences",
)
"""Column titles of Table 2 of Langer et al. (2020): R_LBD, OptLR, COCC, CAHP, RSOI (two columns), ERB, and the number
of differences from training on one worker.
"""


def row_of_table_2(outlook: Outlook, found: StepPrediction) -> tuple[str, ...]:
    """Return the criteria of a strategy as a row of the table of Langer et al. (2020)."""
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
