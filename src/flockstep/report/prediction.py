"""Predicted and measured figures of a run, side by side, as a report shows them."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.report import formatting

HEADINGS = (
    "strategy",
    "predicted seconds per step",
    "in the run",
    "error",
    "predicted MB sent per step",
    "in the run",
    "from",
)


@dataclass(frozen=True)
class Prediction:
    """Duration and sent bytes of a mean step of a worker, both predicted and measured."""

    seconds: float
    measured: float
    sent_bytes: float
    measured_sent_bytes: float
    source: str
    """How the prediction was obtained (closed form or rehearsal), and for which machines."""

    @property
    def error(self) -> float:
        """Relative error of the predicted seconds: positive if the prediction is too long."""
        return self.seconds / self.measured - 1 if self.measured else 0.0

    def cells(self, label: str) -> list[str]:
        """Return the texts of a table row, in the order of `HEADINGS`."""
        took = [formatting.seconds(self.seconds), formatting.seconds(self.measured), f"{self.error:+.1%}"]
        return [label, *took, f"{self.sent_bytes / 1e6:.4g}", f"{self.measured_sent_bytes / 1e6:.4g}", self.source]
