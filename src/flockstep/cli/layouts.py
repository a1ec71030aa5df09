"""`flockstep layouts`: the smallest delay of a step for eight layouts of the parameters."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape

from flockstep.cli import show
from flockstep.cli.layers import shape_named
from flockstep.report import formatting
from flockstep.report.layouts import Delays, ModelSize
from flockstep.report.terminal import TableColumn, TextTable
from flockstep.simulation import units

MODELS = ("vgg-a", "resnet-152", "googlenet")
"""Names of the models in the published figure."""


def show_layouts(what: Sequence[str], workers: int = 16, bandwidth: str = "10gbit", as_json: bool = False) -> None:
    """Print the smallest delay of each layout for each model.

    Raises:
        ConfigurationError: there is no such model, or workers or bandwidth are not above 0, or bandwidth has no unit.
    """
    shapes = [shape_named(name) for name in what or MODELS]
    models = tuple(ModelSize(shape.name, shape.parameters, shape.gradient_bytes()) for shape in shapes)
    delays = Delays(models, workers, units.bandwidth(units.with_unit(bandwidth, "--bandwidth", "1gbit"), "--bandwidth"))
    if as_json:
        show.json(delays.document())
        return
    title = f"Lower bound of the delay per step, {workers} workers with links of {delays.link}"
    headings = [f"{model.name}, {formatting.size(model.nbytes)}" for model in models]
    columns = [TableColumn("layout", text=True), *(TableColumn(one, rank=i) for i, one in enumerate(headings))]
    page = show.page()
    page.print(TextTable(columns, delays.rows(), title))
    for sentence in delays.sentences():
        page.print(escape(sentence), highlight=False)
