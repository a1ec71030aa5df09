"""Predicted and measured figures of a run, which a report shows side by side."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.report import formatting
from flockstep.report.terminal import TableColumn


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


COLUMNS = (
    TableColumn("strategy", text=True, cell=lambda row: row[0]),
    TableColumn("predicted seconds per step", cell=lambda row: formatting.seconds(row[1].seconds)),
    TableColumn("in the run", cell=lambda row: formatting.seconds(row[1].measured)),
    TableColumn("error", cell=lambda row: f"{row[1].error:+.1%}"),
    TableColumn("predicted MB sent per step", cell=lambda row: f"{row[1].sent_bytes / 1e6:.4g}"),
    TableColumn("in the run", cell=lambda row: f"{row[1].measured_sent_bytes / 1e6:.4g}"),
    TableColumn("from", text=True, cell=lambda row: row[1].source),
)
"""Columns of a table whose rows are a run's label and its prediction."""
