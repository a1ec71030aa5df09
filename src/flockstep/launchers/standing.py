"""What a supervisor knows of each node while a run goes on, for the display."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.records.events import Step


@dataclass
class Standing:
    """What is known of one node."""

    state: str = "starting"
    step: int = 0
    loss: float | None = None

    def progress(self, event: Step) -> None:
        """The node has made a step."""
        self.step = event.step
        self.loss = self.loss if event.loss is None else event.loss
