"""Consistency rules: which reads a parameter server admits now, and which gradients it applies now."""

from flockstep.strategies.consistency.asynchronous import Asynchronous
from flockstep.strategies.consistency.base import ClockRule, Consistency, Push, Read, View, by_timestamp
from flockstep.strategies.consistency.bulk_synchronous import BulkSynchronous
from flockstep.strategies.consistency.stale_synchronous import StaleSynchronous

__all__ = [
    "Asynchronous",
    "BulkSynchronous",
    "ClockRule",
    "Consistency",
    "Push",
    "Read",
    "StaleSynchronous",
    "View",
    "by_timestamp",
]
