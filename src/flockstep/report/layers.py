"""Shows a model layer by layer: rows of a table, sentences that summarize them, a figure, and an HTML page of all
three.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flockstep.costs.concurrency import CONCURRENCY, Concurrency
from flockstep.costs.layers import Layer, ModelShape, require_scale
from flockstep.costs.stages import cut
from flockstep.errors import ConfigurationError
from flockstep.report import formatting
from flockstep.report.page import Drawing, Listing, Page
from flockstep.report.style import COLORS, Figure, axis, key, layout, ref, safe

DATA, SPLIT = COLORS[0], COLORS[1]
MANY = 60
"""Number of layers above which the figure shows only layers with parameters."""
HEADINGS = (
    "layer",
    "kind",
    "parameters",
    "multiply-adds",
    "work W",
    "depth D",
    "W/D",
    "activations",
    "gradient",
    "data parallel",
    "split",
    "pipeline",
    *(f"{kind} {what}" for kind in CONCURRENCY for what in ("W", "D", "W/D")),
    "cheaper",
)
PANELS = {"parameters": (0.73, 1.0), "parallelism W/D": (0.41, 0.68), "bytes sent per worker": (0.0, 0.3)}
"""Title of each plot of the figure → vertical range of the plot, as fractions of the plotting area."""
CAPTION = (
    "Layers from the input (left) to the output (right); if there are many layers, only every second or third is "
    "named. Multiply-adds are those of the forward pass of one sample. Work W is the number of floating-point "
    "operations, forward and backward; depth D is the longest chain of dependent operations. Bytes are those that "
    "one worker sends per step: to average the gradient (2 (P-1)/P of the gradient), or to gather and return the "
    "activations of a layer that is split, in the cheaper of its two directions."
)


EXPLAINED = (
    "multiply-adds: in the forward pass of one sample; work W: number of all operations; depth D: number of "
    "operations in the longest chain of dependent operations; W/D: mean number of operations that can run at the "
    "same time; activations: size for the whole batch; data parallel and split: bytes that a worker sends per step "
    "if the data are split over the workers, or if this layer is split; pipeline: bytes of activations and their "
    "gradients that cross the link after this layer per step, if a stage ends with it; data, model and pipeline W, "
    "D and W/D: work, depth and their ratio of one worker in a step over the samples of all workers, if the data are "
    "divided, if this layer is divided, or if this layer belongs to the worker's stage, which computes a micro-batch "
    "for each worker; cheaper: the alternative that "
    "sends fewer bytes (colored if the layer is split), and in the last row the bytes if the cheaper "
    "alternative is used for every layer."
)


@dataclass(frozen=True)
class LayerRow:
    """One layer at a given batch size and number of workers; sizes are in bytes, work in floating-point operations."""

    layer: str
    kind: str
    counted: str
    tied: str | None
    parameters: int
    multiply_adds: float
    """Multiply-add operations of the forward pass for one sample."""
    work_forward: float
    work_backward: float
    depth: int
    parallelism: float
    activation_bytes: float
    gradient_bytes: int
    data_bytes: float
    split_bytes: float | None
    """Bytes sent per worker if the layer is split over the workers; None if the layer has no gradient to save."""
    pipeline_bytes: float
    """Bytes per step on the link after the layer, in both directions, if a stage of a pipeline ends with the layer."""
    cheaper: str | None
    break_even_batch: float | None
    """Number of samples per worker above which data parallelism sends fewer bytes than splitting the layer."""
    concurrency: dict[str, Concurrency]
    """Kind of parallelism ("data", "model", "pipeline") → work, depth and their ratio of one worker in a step over the
    samples of all workers.
    """


def rows(model: ModelShape, batch: int, workers: int) -> list[LayerRow]:
    """Return one row for each layer of `model`, for `batch` samples per worker.

    Raises:
        ConfigurationError: batch or workers are below 1.
    """
    require_scale(batch, workers)
    return [_row(model, layer, batch, workers) for layer in model.layers]


def _row(model: ModelShape, layer: Layer, batch: int, workers: int) -> LayerRow:
    choice = bool(layer.gradients) and workers > 1
    return LayerRow(
        layer.name,
        layer.kind,
        layer.counted,
        layer.tied,
        layer.parameters,
        layer.multiply_adds,
        layer.work_forward(batch),
        layer.work_backward(batch),
        layer.depth(batch),
        layer.parallelism(batch),
        layer.activation_bytes(batch, model.itemsize),
        layer.gradient_bytes(model.itemsize),
        layer.data_bytes(workers, model.itemsize),
        model.split_bytes(layer, batch, workers) if choice else None,
        layer.pipeline_bytes(batch, model.itemsize),
        model.cheaper(layer, batch, workers) if choice else None,
        model.break_even_batch(layer, workers) if choice else None,
        {kind: share(layer, batch, workers) for kind, share in CONCURRENCY.items()},
    )


def document(model: ModelShape, batch: int, workers: int) -> dict[str, Any]:
    """Return the totals and the rows of the table as a dictionary, for JSON."""
    listed = [{**dataclasses.asdict(row), "concurrency": _shares(row)} for row in rows(model, batch, workers)]
    return {
        "model": model.name,
        "note": model.note,
        "batch": batch,
        "workers": workers,
        "itemsize": model.itemsize,
        "parameters": model.parameters,
        "multiply_adds": model.multiply_adds,
        "work_forward": model.work_forward(batch),
        "work_backward": model.work_backward(batch),
        "depth": model.depth(batch),
        "parallelism": model.parallelism(batch),
        "activation_bytes": model.activation_bytes(batch),
        "gradient_bytes": model.gradient_bytes(),
        "data_bytes": model.data_bytes(workers),
        "cheapest_bytes": model.cheapest_bytes(batch, workers),
        "split_layers": list(model.split_layers(batch, workers)),
        "pipeline": _pipeline(model, batch, workers),
        "unknown": list(model.unknown),
        "layers": listed,
    }


def _shares(row: LayerRow) -> dict[str, Any]:
    return {
        kind: {**dataclasses.asdict(share), "parallelism": share.parallelism} for kind, share in row.concurrency.items()
    }


def _pipeline(model: ModelShape, batch: int, workers: int) -> dict[str, Any]:
    """The model as a pipeline of as many stages as there are workers, or why that is not possible."""
    try:
        found = cut(model, workers, batch)
    except ConfigurationError as error:
        return {"stages": workers, "impossible": str(error)}
    return {"stages": workers, **dataclasses.asdict(found), "speedup": found.speedup}


def sentences(model: ModelShape, batch: int, workers: int) -> list[str]:
    """Return the totals of the table as sentences."""
    require_scale(batch, workers)
    first = (
        f"{model.name}: {model.parameters:,} parameters, {amount(model.multiply_adds)} multiply-adds per sample in "
        f"the forward pass; a gradient of {batch} samples takes {amount(model.work(batch))} floating-point operations "
        f"in {model.depth(batch):,} dependent steps: on average {amount(model.parallelism(batch))} operations can run "
        "at the same time."
    )
    said = [first]
    if workers > 1 and model.gradients:
        said.append(_advice(model, batch, workers))
        said.append(_as_stages(model, batch, workers))
    if model.unknown:
        names = [f"{layer.name} ({layer.kind})" for layer in model.layers if layer.name in model.unknown]
        said.append(f"The number of operations of {_listed(names)} could not be counted and is set to 0.")
    return said


def _advice(model: ModelShape, batch: int, workers: int) -> str:
    sent, split = model.data_bytes(workers), model.split_layers(batch, workers)
    start = f"Data parallelism on {workers} workers sends {formatting.size(sent)} per worker and step"
    if not split:
        return f"{start}; at {batch} samples per worker, splitting a layer would not reduce the bytes of any layer."
    least = model.cheapest_bytes(batch, workers)
    named = {layer.name: model.break_even_batch(layer, workers) for layer in model.layers if layer.name in split}
    largest = max(named, key=lambda name: named[name])
    return (
        f"{start}; with {_listed(split)} split over the workers, each worker would send {formatting.size(least)}. "
        f"Splitting {largest} sends fewer bytes below {formatting.number(named[largest])} samples per worker."
    )


def _as_stages(model: ModelShape, batch: int, workers: int) -> str:
    """The model as a pipeline, in a sentence."""
    try:
        found = cut(model, workers, batch)
    except ConfigurationError as error:
        return f"Pipeline parallelism: {error}."
    slowest = max(range(workers), key=found.shares.__getitem__)
    return (
        f"As a pipeline of {workers} stages, the slowest stage, which begins with {found.first[slowest]}, has "
        f"{formatting.number(100 * found.shares[slowest])} % of the work: a speed-up of at most "
        f"{formatting.number(found.speedup)}; at most {formatting.size(max(found.link_bytes))} cross a link per step "
        f"of {batch} samples."
    )


def amount(value: float) -> str:
    """Format a count with three digits and the suffix k, M, G, T, P or E."""
    for prefix, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{formatting.number(value / scale)} {prefix}"
    return formatting.number(value)


def _listed(names: Sequence[str], most: int = 6) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def cells(row: LayerRow) -> tuple[str, ...]:
    """Return the cells of a layer's row as texts, in the order of `HEADINGS`."""
    marks = {"formula": "", "torch": " (counted by torch)", "jax": "", "unknown": " (unknown)"}
    missing = row.counted == "unknown"
    return (
        row.layer,
        row.kind + marks[row.counted] + (f", weights of {row.tied}" if row.tied else ""),
        amount(row.parameters) if row.parameters else "",
        amount(row.multiply_adds) if row.multiply_adds else "",
        formatting.NONE if missing else amount(row.work_forward + row.work_backward),
        formatting.NONE if missing else f"{row.depth:,}",
        formatting.NONE if missing else amount(row.parallelism),
        formatting.size(row.activation_bytes),
        formatting.size(row.gradient_bytes) if row.gradient_bytes else "",
        formatting.size(row.data_bytes) if row.gradient_bytes else "",
        "" if row.split_bytes is None else formatting.size(row.split_bytes),
        formatting.size(row.pipeline_bytes),
        *(text for share in row.concurrency.values() for text in _share_cells(share, missing)),
        row.cheaper or "",
    )


def _share_cells(share: Concurrency, missing: bool) -> tuple[str, ...]:
    if missing:
        return (formatting.NONE,) * 3
    return amount(share.work), f"{share.depth:,}", amount(share.parallelism)


def total_cells(model: ModelShape, batch: int, workers: int) -> tuple[str, ...]:
    """Return the cells of the total row as texts.

    The last is the number of bytes that a worker sends if each layer uses the cheaper alternative.
    """
    return (
        "total",
        "",
        amount(model.parameters),
        amount(model.multiply_adds),
        amount(model.work(batch)),
        f"{model.depth(batch):,}",
        amount(model.parallelism(batch)),
        formatting.size(model.activation_bytes(batch)),
        formatting.size(model.gradient_bytes()),
        formatting.size(model.data_bytes(workers)),
        "",
        "",
        *[""] * (3 * len(CONCURRENCY)),
        formatting.size(model.cheapest_bytes(batch, workers)),
    )


def picture(model: ModelShape, batch: int, workers: int) -> Figure:
    """Return a figure of three plots with one column per layer: parameters, work divided by depth (W/D), and bytes
    sent per worker. Bytes are shown for data parallelism and for splitting the layer.
    """
    shown = [row for row in rows(model, batch, workers) if row.parameters or row.parallelism]
    if len(shown) > MANY:
        shown = [row for row in shown if row.parameters]
    names = [safe(row.layer) for row in shown]
    customdata = [[safe(row.kind), row.depth, amount(row.work_forward + row.work_backward)] for row in shown]
    data: list[dict[str, Any]] = [
        _bars(0, names, [row.parameters or None for row in shown], customdata, "%{y:,} parameters<br>%{customdata[0]}"),
        _bars(
            1,
            names,
            [row.parallelism or None for row in shown],
            customdata,
            "W/D %{y:.3s}<br>W %{customdata[2]}, D %{customdata[1]:,}",
        ),
        _points("gradients (data parallelism)", names, [row.data_bytes or None for row in shown], DATA, "circle"),
        _points("activations (layer split)", names, [row.split_bytes for row in shown], SPLIT, "diamond"),
    ]
    made: dict[str, Any] = {}
    for place, (title, domain) in enumerate(PANELS.items()):
        last = place == len(PANELS) - 1
        made[key("y", place)] = axis(
            title, domain=list(domain), anchor=ref("x", place), type="log", exponentformat="power", dtick=1
        )
        made[key("x", place)] = axis(
            anchor=ref("y", place),
            type="category",
            categoryorder="array",
            categoryarray=names,
            range=[-0.7, len(names) - 0.3],
            showticklabels=last,
            tickvals=names[:: -(-len(names) // MANY)],
            tickangle=-60,
            **({} if last else {"matches": ref("x", len(PANELS) - 1)}),
        )
    legend = {"orientation": "h", "x": 0, "y": PANELS["bytes sent per worker"][1] + 0.005, "yanchor": "bottom"}
    return {"data": data, "layout": layout(760, legend=legend, hovermode="closest", bargap=0.25, **made)}


def _bars(
    place: int, names: Sequence[str], values: Sequence[Any], customdata: Sequence[Any], hover: str
) -> dict[str, Any]:
    return {
        "type": "bar",
        "x": names,
        "y": values,
        "customdata": customdata,
        "marker": {"color": COLORS[11] if place else "#3d4f66"},
        "showlegend": False,
        "hovertemplate": f"%{{x}}<br>{hover}<extra></extra>",
        "xaxis": ref("x", place),
        "yaxis": ref("y", place),
    }


def _points(name: str, layers: Sequence[str], values: Sequence[Any], color: str, symbol: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": layers,
        "y": values,
        "marker": {"color": color, "symbol": symbol, "size": 8},
        "hovertemplate": f"%{{x}}<br>%{{y:.3s}}B: {name}<extra></extra>",
        "xaxis": ref("x", 2),
        "yaxis": ref("y", 2),
    }


def layers_page(model: ModelShape, batch: int, workers: int) -> Page:
    """Return the HTML page about a model's layers, with sentences, figure and table, for `batch` samples per worker.

    Raises:
        ConfigurationError: batch or workers are below 1.
    """
    found = rows(model, batch, workers)
    split = {place: "split" for place, row in enumerate(found) if row.cheaper == "split"}
    return Page(
        brand="flockstep layers",
        title=f"{model.name}: {batch} samples on each of {workers} workers",
        footer=f"{model.note}. Times and links are not considered on this page. MB = 1,000,000 bytes.",
        sentences=sentences(model, batch, workers),
        drawings=(Drawing("picture", "Layer by layer", CAPTION, picture(model, batch, workers)),),
        listings=(
            Listing(
                "Table",
                EXPLAINED,
                HEADINGS,
                [*map(cells, found), total_cells(model, batch, workers)],
                {**split, len(found): "total"},
                (0, 1, len(HEADINGS) - 1),
            ),
        ),
    )
