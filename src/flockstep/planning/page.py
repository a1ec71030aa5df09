"""Writes a plan as a self-contained HTML page: advice and tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flockstep.planning.advice import Advice
from flockstep.planning.plan import Outlook
from flockstep.planning.plan_text import (
    HEADINGS,
    TABLE_2,
    cells,
    many,
    row_of_table_2,
    ruled_out,
    unplanned,
)
from flockstep.report.page import Listing, Page


def write_plan(outlook: Outlook, advice: Advice, path: Path | str, further: Sequence[Listing] = ()) -> Path:
    """Write the page of a plan to `path`, whose folder is created if it is missing, and return the path.

    `further` are additional tables, which come first on the page.
    """
    return plan_page(outlook, advice, further).write(path)


def plan_page(outlook: Outlook, advice: Advice, further: Sequence[Listing] = ()) -> Page:
    """Return the HTML page of a plan: advice and tables."""
    ranked = advice.ranked(outlook)
    marked = {place: "chosen" for place, one in enumerate(ranked) if one is advice.choice}
    rows = [cells(outlook, one, advice.speedups[one.name]) for one in ranked]
    listings = [
        *further,
        Listing("Predictions", PREDICTED, HEADINGS, rows, marked),
        Listing("Criteria", GRADED, TABLE_2, [row_of_table_2(outlook, one) for one in ranked], marked),
    ]
    return Page(
        brand="flockstep plan",
        title=f"{outlook.task.name} on {many(outlook.workers, 'worker')} of {outlook.site.cluster.name}",
        footer="Predictions, not measurements. MB = 1,000,000 bytes.",
        sentences=advice.sentences,
        lists=(
            ("Why", advice.reasons),
            ("What would change this recommendation", advice.changes),
            ("Ruled out", ruled_out(advice.excluded)),
            ("What these figures do not include", [*outlook.left_out, *unplanned(outlook)]),
        ),
        drawings=(),
        listings=listings,
    )


PREDICTED = (
    "Speed-up: speed relative to one worker, measured in trials. Without a trial it is the ratio of the samples per "
    "second, divided by the assumed factor by which the strategy needs more samples than one worker. Strategies are "
    "sorted by speed-up, including strategies that are ruled out. The other columns: samples per second of all workers "
    "together; time between two gradients of a worker; share of this time spent computing; bytes sent per step by a "
    "worker, and through the busiest server; staleness in versions, mean and maximum; memory on a worker. The "
    "recommended strategy has the green row."
)
GRADED = (
    "The columns of table 2 of Langer et al. (2020), computed for this job: whether the data of the workers must be "
    "similar; whether the best learning rate is higher or lower than that of one worker; staleness in versions; "
    "number of hyper-parameters that the strategy adds; share of the slowest worker's delay by which all workers are "
    "delayed (over 100 %: the delay also affects later steps); number of worker deaths that the strategy survives; how "
    "hard it is to reproduce a result exactly; and number of differences from training on one worker."
)
