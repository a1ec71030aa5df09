"""Predicted and measured figures of a run, which a report shows side by side."""

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
    """Seconds and sent bytes of a worker's mean step, both predicted and measured."""

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
        """Return the cells of the run's row as texts, in the order of `HEADINGS`."""
        took = [formatting.seconds(self.seconds), formatting.seconds(self.measured), f"{self.error:+.1%}"]
        return [label, *took, f"{self.sent_bytes / 1e6:.4g}", f"{self.measured_sent_bytes / 1e6:.4g}", self.source]
