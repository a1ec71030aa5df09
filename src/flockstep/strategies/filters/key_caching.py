"""A filter that sends only the hash of a key list that was sent before."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.errors import ConfigurationError
from flockstep.strategies.filters.base import Filter


@dataclass(frozen=True)
class KeyCaching(Filter):
    """Key caching (Li, Andersen, Park et al. 2014, section 3.4), for use with a filter that repeats its choices.

    Sender and receiver remember the last `remembered` distinct key lists, and forget the same lists. The filter lets
    every entry through; an update sent in full has no key list.
    """

    remembered: int = 16

    def __post_init__(self) -> None:
        if self.remembered < 1:
            raise ConfigurationError(
                f"remembered must be >= 1 lists of keys, got {self.remembered}; leave out key_caching to store none"
            )

    @property
    def lists(self) -> int:
        return self.remembered
