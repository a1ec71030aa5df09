"""Consistency rules: which reads a parameter server admits now, and which gradients it applies now."""

from flockstep.strategies.consistency.asynchronous import Asynchronous
from flockstep.strategies.consistency.base import ClockRule, Consistency, ConsistencyView, Push, Read, by_timestamp
from flockstep.strategies.consistency.bulk_synchronous import BulkSynchronous
from flockstep.strategies.consistency.stale_synchronous import StaleSynchronous

__all__ = [
    "Asynchronous",
    "BulkSynchronous",
    "ClockRule",
    "Consistency",
    "ConsistencyView",
    "Push",
    "Read",
    "StaleSynchronous",
    "by_timestamp",
]
