"""The cuts of a split model, and facts about them that only a process with the whole model can find."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SplitFacts:
    """Facts about a whole model that a process needs to build one part of the model."""

    starts: tuple[int, ...]
    """Name of the first layer of each chunk."""
    changing: tuple[str, ...]
    """Names of the buffers that change in training."""
    random: bool
    """Whether the model draws random numbers in training."""
    sample_bytes: int
    """Size in bytes of the largest output of a chunk for one sample."""
    cross_entropy: bool = False
    """Whether the loss is the mean cross entropy of the outputs; determined only if layers are split."""
    called: tuple[str, ...] = ()
    """Modules that a forward pass calls, which FSDP2 may gather one after another; only if PyTorch divides a model."""
    trial: tuple[float, float] | None = None
    """Loss of the model for a batch and norm of its gradient, without dropout, with which processes that PyTorch
    divides a replica over compare theirs; None if the model draws random numbers.
    """
    of_batch: tuple[str, ...] = ()
    """Layers of a pipeline that compute with all samples of a batch, in words."""
    undivided: tuple[str, ...] = ()
    """Layers that a grid does not divide, with the workers that compute them, in words."""
    obstacle: str = ""
    """Reason why a process must build the whole model to build one part; empty if it need not."""
