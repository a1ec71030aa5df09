"""The part of `flockstep plan` that predicts models split over workers, and chooses partition and strategy together."""

from __future__ import annotations

from flockstep.cli import show
from flockstep.planning.advice import Advice
from flockstep.planning.hybrid import HybridAdvice, HybridOptions, SplitPrediction, advise_hybrid
from flockstep.planning.plan import Outlook
from flockstep.planning.plan_text import short, speedup_of
from flockstep.report.formatting import number, seconds, share, size
from flockstep.report.page import Listing
from flockstep.report.terminal import TableColumn, TextTable

HEADINGS = ("partition", "strategy", "speed-up", "samples/s", "step", "computes", "sends", "memory", "replicas")
RANKS = (0, 0, 0, 2, 4, 5, 6, 1, 3)
SHOWN = 6
"""Number of rows of the table in the terminal; --all shows all rows."""
MEANT = (
    "Predictions for replicas that several workers hold together. Speed-up: relative to one worker, from the samples "
    "per second and the number of samples needed for the same accuracy. Sends: bytes that a worker sends per step, "
    "with activations and their gradients. Memory: bytes on the worker that needs the most, activations included."
)


def advised(outlook: Outlook, advice: Advice, asked: HybridOptions) -> HybridAdvice:
    """Search for the best pairs of partition and strategy, and show the progress of the search."""
    with show.status() as say:
        return advise_hybrid(outlook, advice, asked, say)


def table(found: HybridAdvice, everything: bool) -> TextTable:
    """Return the terminal table of the predicted times of split models, highest speed-up first."""
    columns = [TableColumn(one, place < 2, rank) for place, (one, rank) in enumerate(zip(HEADINGS, RANKS, strict=True))]
    shown = found.splits if everything else found.splits[:SHOWN]
    styles = {place: "bold" for place, one in enumerate(shown) if one is found.choice}
    rest = len(found.splits) - len(shown)
    notes = [f"{rest} more combinations of partition and strategy; --all shows them."] if rest else []
    return TextTable(columns, [_cells(found, one) for one in shown], "split replicas", styles=styles, notes=notes)


def listing(found: HybridAdvice) -> Listing:
    """Return the predictions of split models as a table of the HTML page."""
    rows = [_cells(found, one) for one in found.splits]
    marked = {place: "chosen" for place, one in enumerate(found.splits) if one is found.choice}
    return Listing("Split replicas", MEANT, HEADINGS, rows, marked, (0, 1))


def refusals(found: HybridAdvice) -> list[str]:
    """Return one sentence for each combination of partition and strategy that was excluded, with the reason, unless
    the advice gives the same reason.
    """
    said = " ".join(found.sentences)
    return [f"{short(name)}: {why}" for name, why in found.refused if why not in said]


def _cells(found: HybridAdvice, one: SplitPrediction) -> tuple[str, ...]:
    return (
        str(one.partition),
        short(str(one.strategy)) if one.replicas > 1 else "none",
        speedup_of(found.speedups[one.name]),
        number(one.samples_per_second),
        seconds(one.seconds),
        share(one.utilization),
        size(one.sent_bytes),
        size(one.memory),
        str(one.replicas),
    )
