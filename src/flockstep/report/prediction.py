"""What was predicted of a run, beside what came of it, as a report shows it."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.report import words

HEADINGS = ("strategy", "predicted s a step", "in the run", "error", "predicted MB sent a step", "in the run", "from")


@dataclass(frozen=True)
class Prediction:
    """A step of a worker, in the mean: seconds and bytes sent, both ways."""

    seconds: float
    measured: float
    sent: float
    measured_sent: float
    source: str
    """What the prediction is from: a closed form or a rehearsal, and of which machines."""

    @property
    def error(self) -> float:
        """By which share of the measured seconds the prediction is too long."""
        return self.seconds / self.measured - 1 if self.measured else 0.0

    def cells(self, label: str) -> list[str]:
        """Those under `HEADINGS`."""
        took = [words.seconds(self.seconds), words.seconds(self.measured), f"{self.error:+.1%}"]
        return [label, *took, f"{self.sent / 1e6:.4g}", f"{self.measured_sent / 1e6:.4g}", self.source]
