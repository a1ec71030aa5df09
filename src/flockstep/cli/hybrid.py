"""The part of `flockstep plan` that predicts models split over workers, and chooses partition and strategy together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flockstep.cli import show
from flockstep.costs.cluster_reading import memory_bytes
from flockstep.partitions.base import Partition
from flockstep.planning.advice import Advice
from flockstep.planning.hybrid import HybridAdvice, SplitPrediction, advise_hybrid, partitions_of
from flockstep.planning.plan import Outlook
from flockstep.planning.plan_text import short, speedup_of
from flockstep.report.formatting import number, seconds, share, size
from flockstep.report.page import Listing
from flockstep.report.terminal import TableColumn, TextTable
from flockstep.strategies.base import Strategy

HEADINGS = ("partition", "strategy", "speed-up", "samples/s", "step", "computes", "sends", "memory", "replicas")
RANKS = (0, 0, 0, 2, 4, 5, 6, 1, 3)
SHOWN = 6
"""Number of rows of the table in the terminal; --all shows all rows."""
MEANT = (
    "Predictions for replicas that several workers hold together. Speed-up: relative to one worker, from the samples "
    "per second and the number of samples needed for the same accuracy. Sends: bytes that a worker sends per step, "
    "with activations and their gradients. Memory: bytes on the worker that needs the most, activations included."
)


@dataclass(frozen=True)
class HybridOptions:
    """The options of `flockstep plan` about split models."""

    search: bool
    partitions: tuple[Partition, ...]
    memory: float | None
    """Memory of a worker in bytes; None for the memory that the cluster states."""

    @property
    def wanted(self) -> bool:
        """Whether the user asked for predictions of split models."""
        return self.search or bool(self.partitions) or self.memory is not None


def options(hybrid: bool, partitions: Sequence[str] | None, memory: str | None) -> HybridOptions:
    """Return the parsed values of --hybrid, --partition and --memory.

    Raises:
        ConfigurationError: a partition does not split the model, or the amount of memory has no unit.
    """
    return HybridOptions(hybrid, partitions_of(partitions or ()), None if memory is None else memory_bytes(memory))


def advised(outlook: Outlook, advice: Advice, asked: HybridOptions, strategies: Sequence[str]) -> HybridAdvice:
    """Search for the best pairs of partition and strategy, and show the progress of the search."""
    with show.status() as say:
        return advise_hybrid(outlook, advice, asked.partitions, [Strategy.parse(text) for text in strategies], say)


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
    return Listing("Split replicas", " ".join((*found.sentences, MEANT)), HEADINGS, rows, marked, (0, 1))


def refusals(found: HybridAdvice) -> list[str]:
    """Return one sentence for each combination of partition and strategy that was excluded, with the reason."""
    return [f"{short(name)}: {why}" for name, why in found.refused]


def _cells(found: HybridAdvice, one: SplitPrediction) -> tuple[str, ...]:
    return (
        str(one.partition),
        short(str(one.strategy)),
        speedup_of(found.speedups[one.name]),
        number(one.samples_per_second),
        seconds(one.seconds),
        share(one.utilization),
        size(one.sent_bytes),
        size(one.memory),
        str(one.replicas),
    )
