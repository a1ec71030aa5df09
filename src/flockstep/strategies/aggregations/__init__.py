"""Aggregations: how the vectors of several workers are combined into one."""

from flockstep.strategies.aggregations.base import Aggregation, Combined
from flockstep.strategies.aggregations.mean import Mean, mean_of

__all__ = ["Aggregation", "Combined", "Mean", "mean_of"]
