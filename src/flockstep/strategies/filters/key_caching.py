"""A list of keys that was sent before travels as its hash."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.errors import ConfigurationError
from flockstep.strategies.filters.base import Filter


@dataclass(frozen=True)
class KeyCaching(Filter):
    """Key caching (Li, Andersen, Park et al. 2014, section 3.4), beside a filter whose choice repeats itself.

    Sender and receiver remember the last `remembered` distinct lists, and forget the same ones. It lets everything
    through; where all entries travel, there is no list.
    """

    remembered: int = 16

    def __post_init__(self) -> None:
        if self.remembered < 1:
            raise ConfigurationError(f"remembered must be >= 1 lists, got {self.remembered}; leave out key_caching")

    @property
    def lists(self) -> int:
        """As given."""
        return self.remembered
