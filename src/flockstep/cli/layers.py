"""`flockstep layers`: shows the layers of a job's model, of a file's model, or of a reference model."""

from __future__ import annotations

from rich.markup import escape

from flockstep import registry
from flockstep.cli import show
from flockstep.costs.concurrency import CONCURRENCY
from flockstep.costs.layers import ModelShape
from flockstep.costs.reference import MODELS, reference
from flockstep.errors import UnknownName
from flockstep.frameworks.layers import file_shape, job_shape
from flockstep.report import layers
from flockstep.report.terminal import TableColumn, TextTable
from flockstep.workloads.base import Workload

MANY = 40
"""Number of layers above which the table shows only layers with parameters."""
RANKS = (0, 3, 0, 5, 6, 7, 4, 8, 1, 0, 0, 9, *(12, 11, 10) * len(CONCURRENCY), 2)
"""Heading → rank of its column; a narrow terminal leaves out the columns of the highest rank first."""


def show_layers(
    what: str,
    batch: int = 32,
    workers: int = 16,
    as_json: bool = False,
    everything: bool = False,
) -> None:
    """Print a table of the layers of the model `what` for `batch` samples per worker.

    `what` is a workload's expression, a reference model, or a Python file with `job()` or `model()` and `inputs()`.
    A long table leaves out layers without parameters, unless `everything` is set.

    Raises:
        ConfigurationError: there is no such model, the model cannot be run, or batch or workers are below 1.
    """
    model = shape_named(what)
    found = layers.document(model, batch, workers)
    if as_json:
        show.json(found)
        return
    page = show.page()
    page.print(_table(model, batch, workers, everything))
    for sentence in layers.sentences(model, batch, workers):
        page.print(escape(sentence), highlight=False)


def shape_named(what: str) -> ModelShape:
    """Return the layers of the workload, reference model or Python file that is named on the command line.

    Raises:
        ConfigurationError: there is no such model, or the model cannot be run.
    """
    if what.endswith(".py"):
        return file_shape(what)
    if what in MODELS:
        return reference(what)
    known = registry.names("workload")
    if "(" not in what and what not in known and what not in registry.aliases("workload"):
        raise UnknownName.among("workload or reference model", what, [*known, *MODELS])
    return job_shape(Workload.parse(what).job(0))


def _table(model: ModelShape, batch: int, workers: int, everything: bool) -> TextTable:
    rows = layers.rows(model, batch, workers)
    shown = [row for row in rows if everything or len(rows) <= MANY or row.parameters or row.counted != "formula"]
    left_out = len(rows) - len(shown)
    title = f"{model.name}: {batch} samples on each of {workers} workers"
    columns = [
        TableColumn(one, text=place < 2 or place == len(layers.HEADINGS) - 1, rank=rank)
        for place, (one, rank) in enumerate(zip(layers.HEADINGS, RANKS, strict=True))
    ]
    cells = [*map(layers.cells, shown), layers.total_cells(model, batch, workers)]
    said = (
        [f"{left_out} layers without parameters are counted in the total but not shown; --all shows them."]
        if left_out
        else []
    )
    return TextTable(columns, cells, title, total=True, notes=said)
