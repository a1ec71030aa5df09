"""A model layer by layer, as one self-contained page."""

from __future__ import annotations

from pathlib import Path

from flockstep.costs.layers import ModelShape
from flockstep.report import layers
from flockstep.report.page import Drawing, Listing, Page


def write_layers(model: ModelShape, batch: int, workers: int, path: Path | str) -> Path:
    """Write the page to `path` and return it; the folder is made if need be."""
    return layers_page(model, batch, workers).write(path)


def layers_page(model: ModelShape, batch: int, workers: int) -> Page:
    """Sentences, the picture and the table, for `batch` samples per worker.

    Raises:
        ConfigurationError: batch or workers are below 1.
    """
    rows = layers.rows(model, batch, workers)
    split = {place: "split" for place, row in enumerate(rows) if row.cheaper == "split"}
    return Page(
        brand="flockstep layers",
        title=f"{model.name}: {batch} samples on each of {workers} workers",
        footer=f"{model.note}. Times and links are not part of this page. MB = 1,000,000 bytes.",
        sentences=layers.sentences(model, batch, workers),
        drawings=(Drawing("picture", "Layer by layer", layers.CAPTION, layers.picture(model, batch, workers)),),
        listings=(
            Listing(
                "Table",
                layers.EXPLAINED,
                layers.HEADINGS,
                [*map(layers.cells, rows), layers.total_cells(model, batch, workers)],
                {**split, len(rows): "total"},
                (0, 1, len(layers.HEADINGS) - 1),
            ),
        ),
    )
