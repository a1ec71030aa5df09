"""The job of `split_job`, for replicas that PyTorch divides over processes, which need torch's own compiler."""

from __future__ import annotations

import support.compiler  # noqa: F401
from support.split_job import job

__all__ = ["job"]
