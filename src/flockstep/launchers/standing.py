"""What a supervisor knows of each node while a run goes on, for the display."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.messages import Fields


@dataclass
class Standing:
    """What is known of one node."""

    state: str = "starting"
    step: int = 0
    loss: float | None = None

    def progress(self, note: Fields) -> None:
        """The node reports how far it is."""
        self.step = int(note["step"])
        self.loss = float(note["loss"]) if "loss" in note else self.loss
