"""Limits the number of threads that numerical libraries use."""

from __future__ import annotations

import contextlib
import importlib
import sys

JAX_THREADS = "NPROC"
"""Environment variable from which XLA on the CPU takes its number of threads, when JAX starts."""


def limit_threads(threads: int) -> None:
    """Let the numerical libraries imported so far use `threads` threads; more threads than cores slow each other down.

    A user's own process calls this again after further imports, because its environment variables are left alone.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
    with contextlib.suppress(ImportError):  # part of scikit-learn; numpy alone cannot limit its BLAS
        importlib.import_module("threadpoolctl").threadpool_limits(threads)
