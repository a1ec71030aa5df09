"""Shows a model layer by layer, and the communication delay of its step by parameter layout, as in figure 14 of Langer
et al. (2020): tables, and sentences that summarize them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flockstep.collectives.layouts import LAYOUTS, Times
from flockstep.costs.layers import CONCURRENCY, Layer, ModelShape, require_scale
from flockstep.costs.stages import chunks
from flockstep.errors import ConfigurationError
from flockstep.report import formatting
from flockstep.report.terminal import TableColumn, TextTable

MOST = 4
"""Largest number of models in one table of layouts."""
MANY = 40
"""Number of layers above which a table shows only layers with parameters, unless everything is asked for."""
Row = dict[str, Any]
"""Figures of one layer, or of the whole model, at a batch size and a number of workers: the objects of `document`."""


def rows(model: ModelShape, batch: int, workers: int) -> list[Row]:
    """Return a row for each layer, at `batch` samples per worker; sizes in bytes, work in floating-point operations."""
    require_scale(batch, workers)
    return [_row(model, layer, batch, workers) for layer in model.layers]


def _row(model: ModelShape, layer: Layer, batch: int, workers: int) -> Row:
    choice = bool(layer.gradients) and workers > 1  # without a gradient there are no bytes to save
    shares = {kind: share(layer, batch, workers) for kind, share in CONCURRENCY.items()}
    return {
        "layer": layer.name,
        "kind": layer.kind,
        "counted": layer.counted,
        "tied": layer.tied,
        "parameters": layer.parameters,
        "multiply_adds": layer.multiply_adds,  # of the forward pass for one sample
        "work_forward": layer.work_forward(batch),
        "work_backward": layer.work_backward(batch),
        "depth": layer.depth(batch),
        "parallelism": layer.parallelism(batch),
        "activation_bytes": layer.activation_bytes(batch, model.itemsize),
        "gradient_bytes": layer.gradient_bytes(model.itemsize),
        "data_bytes": layer.data_bytes(workers, model.itemsize),
        "split_bytes": model.split_bytes(layer, batch, workers) if choice else None,
        "pipeline_bytes": layer.pipeline_bytes(batch, model.itemsize),  # both ways, if a stage ends with the layer
        "cheaper": model.cheaper(layer, batch, workers) if choice else None,
        "break_even_batch": model.break_even_batch(layer, workers) if choice else None,
        "concurrency": {
            kind: {**dataclasses.asdict(share), "parallelism": share.parallelism} for kind, share in shares.items()
        },
    }


def document(model: ModelShape, batch: int, workers: int) -> dict[str, Any]:
    """Return the totals and the rows of the table as a dictionary, for JSON."""
    require_scale(batch, workers)
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
        "layers": rows(model, batch, workers),
    }


def _pipeline(model: ModelShape, batch: int, workers: int) -> dict[str, Any]:
    """The model as a pipeline of as many stages as there are workers, or why that is not possible."""
    try:
        stages = chunks(model, workers, batch)
    except ConfigurationError as error:
        return {"stages": workers, "impossible": str(error)}
    total = model.work(batch)
    shares = [sum(layer.work(batch) for layer in stage) / total if total else 1 / workers for stage in stages]
    return {
        "stages": workers,
        "first": [stage[0].name for stage in stages],
        "shares": shares,  # of the work of a gradient
        "link_bytes": [stage[-1].pipeline_bytes(batch, model.itemsize) for stage in stages[:-1]],
        "speedup": 1 / max(shares),  # reached if the slowest stage never waits
    }


def sentences(model: ModelShape, batch: int, workers: int) -> list[str]:
    """Return the totals of the table as sentences."""
    found = document(model, batch, workers)
    first = (
        f"{model.name}: {model.parameters:,} parameters, {amount(model.multiply_adds)} multiply-adds per sample in "
        f"the forward pass; a gradient of {batch} samples takes {amount(model.work(batch))} floating-point operations "
        f"in {model.depth(batch):,} dependent steps: on average {amount(model.parallelism(batch))} operations can run "
        "at the same time."
    )
    said = [first]
    if workers > 1 and model.gradients:
        split, pipeline = found["split_layers"], found["pipeline"]
        start = (
            f"Data parallelism on {workers} workers sends {formatting.size(found['data_bytes'])} per worker and step"
        )
        if split:
            named = {row["layer"]: row["break_even_batch"] for row in found["layers"] if row["layer"] in split}
            largest = max(named, key=lambda name: named[name])
            said.append(
                f"{start}; with {_listed(split)} split over the workers, each worker would send "
                f"{formatting.size(found['cheapest_bytes'])}. Splitting {largest} sends fewer bytes below "
                f"{formatting.number(named[largest])} samples per worker."
            )
        else:
            said.append(
                f"{start}; at {batch} samples per worker, splitting a layer would not reduce the bytes of any layer."
            )
        if "impossible" in pipeline:
            said.append(f"Pipeline parallelism: {pipeline['impossible']}.")
        else:
            shares = pipeline["shares"]
            slowest = max(range(workers), key=shares.__getitem__)
            said.append(
                f"As a pipeline of {workers} stages, the slowest stage, which begins with "
                f"{pipeline['first'][slowest]}, has {formatting.number(100 * shares[slowest])} % of the work: a "
                f"speed-up of at most {formatting.number(pipeline['speedup'])}; at most "
                f"{formatting.size(max(pipeline['link_bytes']))} cross a link per step of {batch} samples."
            )
    if model.unknown:
        names = [f"{layer.name} ({layer.kind})" for layer in model.layers if layer.name in model.unknown]
        said.append(f"The number of operations of {_listed(names)} could not be counted and is set to 0.")
    return said


def amount(value: float) -> str:
    """Format a count with three digits and the suffix k, M, G, T, P or E."""
    for prefix, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{formatting.number(value / scale)} {prefix}"
    return formatting.number(value)


def _listed(names: Sequence[str], most: int = 6) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def table(model: ModelShape, batch: int, workers: int, everything: bool = False) -> TextTable:
    """Return the table of the layers with the total below; unless `everything` is set, a long table omits layers
    without parameters.

    The last cell of the total is the number of bytes that a worker sends if each layer uses the cheaper alternative.
    """
    said = document(model, batch, workers)
    found: list[Row] = said["layers"]
    shown = [
        row for row in found if everything or len(found) <= MANY or row["parameters"] or row["counted"] != "formula"
    ]
    none: Row = {"kind": "", "counted": "formula", "tied": None, "split_bytes": None, "pipeline_bytes": None}
    total = {**said, **none, "layer": "total", "concurrency": {}, "cheaper": formatting.size(said["cheapest_bytes"])}
    left_out = len(found) - len(shown)
    note = f"{left_out} layers without parameters are counted in the total but not shown; --all shows them."
    title = f"{model.name}: {batch} samples on each of {workers} workers"
    return TextTable.of(COLUMNS, [*shown, total], title=title, total=True, notes=[note] if left_out else [])


def _kind(row: Row) -> str:
    marks = {"formula": "", "torch": " (counted by torch)", "jax": "", "unknown": " (unknown)"}
    return str(row["kind"]) + marks[row["counted"]] + (f", weights of {row['tied']}" if row["tied"] else "")


def _figure(form: Callable[[Any], str], of: Callable[[Row], Any]) -> Callable[[Row], str]:
    """A cell of a figure; a dash if the operations of the layer could not be counted."""
    return lambda row: formatting.NONE if row["counted"] == "unknown" else form(of(row))


def _known(form: Callable[[Any], str], name: str, needs: str = "") -> Callable[[Row], str]:
    """A cell of the figure `name`; blank if the row does not have it, or the figure that it `needs`."""
    return lambda row: form(row[name]) if row[needs or name] else ""


def _unless_none(name: str) -> Callable[[Row], str]:
    return lambda row: "" if row[name] is None else formatting.size(row[name])


def _of_workers(kind: str) -> list[TableColumn]:
    """Work, depth and parallelism of one worker, if the layer is divided over the workers in this way."""
    figures = (("W", "work", amount, 12), ("D", "depth", "{:,}".format, 11), ("W/D", "parallelism", amount, 10))

    def cell(form: Callable[[Any], str], name: str) -> Callable[[Row], str]:
        shown = _figure(form, lambda row: row["concurrency"][kind][name])
        return lambda row: shown(row) if row["concurrency"] else ""

    return [TableColumn(f"{kind} {what}", rank=rank, cell=cell(form, name)) for what, name, form, rank in figures]


COLUMNS = (
    TableColumn("layer", text=True, cell=lambda row: row["layer"]),
    TableColumn("kind", text=True, rank=3, cell=_kind),
    TableColumn("parameters", cell=_known(amount, "parameters")),
    TableColumn("multiply-adds", rank=5, cell=_known(amount, "multiply_adds")),
    TableColumn("work W", rank=6, cell=_figure(amount, lambda row: row["work_forward"] + row["work_backward"])),
    TableColumn("depth D", rank=7, cell=_figure("{:,}".format, lambda row: row["depth"])),
    TableColumn("W/D", rank=4, cell=_figure(amount, lambda row: row["parallelism"])),
    TableColumn("activations", rank=8, cell=lambda row: formatting.size(row["activation_bytes"])),
    TableColumn("gradient", rank=1, cell=_known(formatting.size, "gradient_bytes")),
    TableColumn("data parallel", cell=_known(formatting.size, "data_bytes", needs="gradient_bytes")),
    TableColumn("split", cell=_unless_none("split_bytes")),
    TableColumn("pipeline", rank=9, cell=_unless_none("pipeline_bytes")),
    *(column for kind in CONCURRENCY for column in _of_workers(kind)),
    TableColumn("cheaper", text=True, rank=2, cell=lambda row: row["cheaper"] or ""),
)


@dataclass(frozen=True)
class Delays:
    """Communication delays of models on `workers` workers, each with a link of `bandwidth` bytes per second."""

    models: tuple[ModelShape, ...]
    workers: int
    bandwidth: float

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigurationError(f"layouts need >= 1 worker, got {self.workers}; 16 is usual")
        if not 1 <= len(self.models) <= MOST:
            raise ConfigurationError(f"layouts need 1 to {MOST} models, got {len(self.models)}; give for example vgg-a")

    def seconds(self, model: ModelShape, name: str) -> float:
        """Return the seconds per step of the layout `name` for one model."""
        return LAYOUTS[name](self.workers, Times.of(model.gradient_bytes(), self.bandwidth))

    def document(self) -> dict[str, Any]:
        """Return models, bandwidth and the seconds of every layout as a dictionary, for JSON."""
        found = {model.name: {name: self.seconds(model, name) for name in LAYOUTS} for model in self.models}
        sizes = {model.name: {"parameters": model.parameters, "bytes": model.gradient_bytes()} for model in self.models}
        return {"workers": self.workers, "bandwidth": self.bandwidth, "models": sizes, "seconds": found}

    def table(self) -> TextTable:
        """Return the table of delays: one row for each layout, one column for each model."""
        columns = [
            TableColumn(
                f"{model.name}, {formatting.size(model.gradient_bytes())}",
                rank=rank,
                cell=lambda name, model=model: formatting.seconds(self.seconds(model, name)),  # type: ignore[misc]
            )
            for rank, model in enumerate(self.models)
        ]
        link = speed(self.bandwidth)
        title = f"Lower bound of the delay per step, {self.workers} workers with links of {link}"
        return TextTable.of([TableColumn("layout", text=True), *columns], LAYOUTS, title=title)

    def sentences(self) -> list[str]:
        """Sentences with the main results of the table of delays."""
        shared = [name for name in LAYOUTS if not name.startswith("asynchronous")]
        said = []
        for model in self.models:
            least, most = min(shared, key=lambda n: self.seconds(model, n)), "naive server"
            times = self.seconds(model, most) / self.seconds(model, least)
            longest, shortest = (formatting.seconds(self.seconds(model, name)) for name in (most, least))
            said.append(
                f"{model.name} ({formatting.size(model.gradient_bytes())}) on {self.workers} workers with links of "
                f"{speed(self.bandwidth)}: a step takes at least {longest} with the layout {most} and at least "
                f"{shortest} with the layout {least}, which is {formatting.number(times)} times less."
            )
        return said


def speed(bandwidth: float) -> str:
    """Format bytes per second as bits per second, for example "1 Gbit/s"."""
    bits = 8 * bandwidth
    for unit, scale in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= 0.9995 * scale:
            return f"{bits / scale:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"
