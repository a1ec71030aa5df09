"""Where a model is cut, and the facts about it that take the whole model to find."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelCut:
    """What a process needs to know of a whole model to build one part of it."""

    starts: tuple[int, ...]
    """First layer of each chunk."""
    changing: tuple[str, ...]
    """Names of the buffers that change in training."""
    random: bool
    """Whether the model draws random numbers in training."""
    sample_bytes: int
    """Size in bytes of the largest output of a chunk for one sample."""
    obstacle: str = ""
    """Reason why a process must build the whole model to build a part of it; empty: it need not."""
