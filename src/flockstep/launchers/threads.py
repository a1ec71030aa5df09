"""Limits the number of threads of numerical libraries."""

from __future__ import annotations

import importlib
import sys

JAX_THREADS = "NPROC"
"""Environment variable from which XLA, when JAX starts, takes the number of its threads on the CPU."""


def limit_threads(threads: int) -> None:
    """Limit the numerical libraries imported so far to `threads` threads; more threads than cores would slow each other
    down.

    The user's own process calls this again after further imports, because flockstep does not change its environment
    variables.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
    importlib.import_module("threadpoolctl").threadpool_limits(threads)  # numpy alone cannot limit its BLAS
