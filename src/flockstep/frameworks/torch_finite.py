"""Checks that gradients are finite while they are in the processor's cache, so that a step need not read all of them
again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

LARGE = 1 << 20
"""Smallest size, in elements, of a flat gradient whose parts may stay in the tensors that autograd creates."""
SMALL = 1 << 16
"""Smallest size, in elements, of a gradient of which a step checks some elements a second time."""


class LooseGradients:
    """Records whether the gradients outside of the flat array, in tensors that autograd has created, are all finite.

    A gradient is checked when a backward pass has completed it. If the gradient is replaced afterwards, or torch writes
    to it, it is no longer known to be finite. Torch does not count writes through `.data` and numpy, so a step checks
    some elements of each large gradient a second time.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]):
        self._parameters = parameters
        self._seen: list[tuple[int, int] | None] = [None] * len(parameters)
        """Address and version of each gradient that was finite when it was checked."""

    def look(self, index: int) -> None:
        """Check whether a parameter's gradient, which a backward pass has just completed, is finite."""
        gradient = self._parameters[index].grad
        assert gradient is not None
        values = _memory_of(gradient)
        finite = values is not None and math.isfinite(np.vdot(values, values))
        self._seen[index] = (gradient.data_ptr(), gradient._version) if finite else None

    def known(self) -> bool:
        """Return whether all gradients are known to be finite, and discard the results of the checks."""
        seen, self._seen = self._seen, [None] * len(self._parameters)
        gradients = ((parameter.grad, at) for parameter, at in zip(self._parameters, seen, strict=True))
        return all(one is None or _unchanged(one, at) for one, at in gradients)


def _unchanged(gradient: torch.Tensor, at: tuple[int, int] | None) -> bool:
    """Whether a gradient has the address and version `at`, and some of its elements are finite if there are many."""
    if (gradient.data_ptr(), gradient._version) != at:
        return False
    if gradient.numel() < SMALL:
        return True
    sample = _memory_of(gradient)[:: gradient.numel() // 16]
    return math.isfinite(np.vdot(sample, sample))


def _memory_of(gradient: torch.Tensor) -> Any:
    """The elements of a dense gradient on the CPU as a numpy array (elements,), in the order of the memory; None for
    other gradients.
    """
    if gradient.layout != torch.strided or not gradient.is_cpu or gradient.dtype not in (torch.float32, torch.float64):
        return None
    if not (gradient.is_contiguous() or gradient.is_contiguous(memory_format=torch.channels_last)):
        return None
    return gradient.as_strided((gradient.numel(),), (1,), gradient.storage_offset()).numpy()
