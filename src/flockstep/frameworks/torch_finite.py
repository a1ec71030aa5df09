"""Looks at gradients while the processor has them in its cache, so that a step need not read all gradients again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

LARGE = 1 << 20
"""Smallest number of elements of a flat gradient whose parts stay where autograd makes them."""
SMALL = 1 << 16
"""Smallest number of elements of a single gradient of which some are looked at once more in the step."""


class LooseGradients:
    """Knows whether all gradients are finite that lie where autograd has made them, outside of the flat array.

    A gradient is looked at when a backward pass has completed it. A gradient that was replaced since, or that torch has
    written to, is not known to be finite. For writes through `.data` and numpy, which torch does not count, a step
    looks at some elements of each large gradient once more.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]):
        self._parameters = parameters
        self._seen: list[tuple[int, int] | None] = [None] * len(parameters)
        """Address and version of each gradient that was finite when it was looked at."""

    def look(self, index: int) -> None:
        """Look at a parameter's gradient, which a backward pass has just completed."""
        gradient = self._parameters[index].grad
        assert gradient is not None
        values = _memory_of(gradient)
        finite = values is not None and math.isfinite(np.vdot(values, values))
        self._seen[index] = (gradient.data_ptr(), gradient._version) if finite else None

    def known(self) -> bool:
        """Return whether all gradients are known to be finite, and forget what was known of them."""
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
