"""The chain of `split_jobs`, for replicas that PyTorch divides over processes, which need torch's own compiler."""

from __future__ import annotations

import support.compiler  # noqa: F401
from support.split_jobs import job

__all__ = ["job"]
