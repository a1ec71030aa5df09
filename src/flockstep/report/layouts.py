"""Lower bounds of the communication delay of a step, by parameter layout, as in figure 14 of Langer et al. (2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flockstep.collectives.layouts import LAYOUTS, Times
from flockstep.costs.layers import ModelShape
from flockstep.errors import ConfigurationError
from flockstep.report import formatting
from flockstep.report.terminal import TableColumn, TextTable

MOST = 4
"""Largest number of models in one table."""


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
