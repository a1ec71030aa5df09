"""Shows a model layer by layer: rows of a table, and sentences that summarize them."""

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
