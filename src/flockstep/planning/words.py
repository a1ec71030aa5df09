"""A plan as text: the same cells in the terminal and on the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flockstep.planning.plan import Outlook
from flockstep.planning.prospect import Prospect
from flockstep.planning.scaling import Curve
from flockstep.report.words import NONE, number, seconds, share, size

if TYPE_CHECKING:
    from flockstep.planning.check import Check

HEADINGS = (
    "strategy",
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
CHECK_HEADINGS = (
    "strategy",
    "workers",
    "step predicted",
    "measured",
    "error",
    "bytes predicted",
    "measured",
    "error",
    "from",
)


def cells(outlook: Outlook, found: Prospect) -> tuple[str, ...]:
    """A row of the table."""
    bound = found.staleness_bound
    return (
        found.name,
        number(found.samples_per_second),
        seconds(found.seconds),
        share(found.utilisation),
        size(found.sent),
        size(found.server_bytes) if found.server_bytes else NONE,
        NONE if found.staleness is None else number(found.staleness, 2),
        NONE if bound is None else str(bound),
        size(found.memory),
        found.source,
    )


def scaling_sentence(one: Curve) -> str:
    """Where a strategy begins and stops to pay."""
    if one.beats_one_from is None:
        return f"{one.name} never gets through more than one worker alone"
    far = "as far as was looked" if one.pays_to == one.workers[-1] else f"up to {one.pays_to} workers"
    return f"{one.name} beats one worker from {one.beats_one_from} workers on; doubling them pays {far}"


def unplanned(outlook: Outlook) -> tuple[str, ...]:
    """What is not in the table, in a sentence or two."""
    formless = [name for name, why in outlook.refused if "no closed form" in why]
    others = [(name, why) for name, why in outlook.refused if name not in formless]
    said = [f"{name}: {why}" for name, why in others]
    if formless:
        said.append(f"without a closed form, rehearsed by --all: {', '.join(formless)}")
    return tuple(said)


def check_cells(one: Check) -> tuple[str, ...]:
    """A row of prediction beside measurement."""
    return (
        one.strategy,
        str(one.workers),
        seconds(one.predicted.seconds),
        seconds(one.measured.seconds),
        f"{one.error:+.1%}",
        size(one.predicted.sent),
        size(one.measured.sent),
        NONE if one.sent_error is None else f"{one.sent_error:+.1%}",
        one.source,
    )


TABLE_2 = (
    "strategy",
    "technique",
    "alike data",
    "learning rate",
    "late",
    "hyper-parameters",
    "waits for slowest",
    "survives",
    "reproducible",
    "departures",
)
"""Of Langer et al. (2020): R_LBD, OptLR, COCC, CAHP, RSOI (two columns), ERB, and how many departures were counted."""


def row_of_table_2(outlook: Outlook, found: Prospect) -> tuple[str, ...]:
    """A strategy's criteria."""
    row = outlook.criteria(found)
    return (
        found.name,
        row.technique,
        "needed" if row.balanced_data else "not needed",
        row.learning_rate,
        NONE if row.overlap is None else number(row.overlap, 2),
        str(row.hyper_parameters),
        NONE if row.exposure is None else f"{row.exposure:.0%}",
        "yes" if row.survives else "no",
        row.reproducible,
        str(len(outlook.departures(found))),
    )
