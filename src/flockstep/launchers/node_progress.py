"""The state of each node during a run, for the display."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.records.events import StepEvent


@dataclass
class NodeProgress:
    """State of one node, as the display shows it."""

    state: str = "starting"
    step: int = 0
    loss: float | None = None

    def progress(self, event: StepEvent) -> None:
        """Update the state with a step of the node."""
        self.step = event.step
        self.loss = self.loss if event.loss is None else event.loss
