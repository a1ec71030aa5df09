"""A model layer by layer, as one self-contained page."""

from __future__ import annotations

from pathlib import Path

from flockstep.costs.layers import ModelShape
from flockstep.report import layers
from flockstep.report.html import _environment, _plotly_source, _script_safe


def write_layers(model: ModelShape, batch: int, workers: int, path: Path | str) -> Path:
    """Write the page to `path` and return it; the folder is made if need be."""
    path = Path(path)
    text = render_layers(model, batch, workers)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def render_layers(model: ModelShape, batch: int, workers: int) -> str:
    """The page as text, for `batch` samples per worker.

    Raises:
        ConfigurationError: batch or workers are below 1.
    """
    listed = [
        ("split" if row.cheaper == "split" else "", layers.cells(row)) for row in layers.rows(model, batch, workers)
    ]
    return (
        _environment()
        .get_template("layers.html.j2")
        .render(
            title=f"{model.name}: {batch} samples on each of {workers} workers",
            sentences=layers.sentences(model, batch, workers),
            caption=layers.CAPTION,
            explained=layers.EXPLAINED,
            figure=layers.picture(model, batch, workers),
            headings=layers.HEADINGS,
            rows=[*listed, ("total", layers.total_cells(model, batch, workers))],
            note=model.note,
            json=_script_safe,
            plotly=_plotly_source(),
        )
    )
