"""Seconds of a message and of a stream of messages: latency and bandwidth, and LogGP.

The latency-bandwidth link is that of the collectives' costs, `flockstep.collectives.costs.Link`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flockstep.collectives.costs import Link
from flockstep.errors import ConfigurationError


@dataclass(frozen=True)
class LogGP:
    """The LogGP link (Alexandrov, Ionescu, Schauser & Scheiman 1995, section 2), all in seconds.

    `latency` L; `overhead` o for which a processor is busy with sending, and another with receiving; `gap` g between
    two messages; `per_byte` G, the gap per byte of a long message.
    """

    latency: float
    overhead: float
    gap: float
    per_byte: float

    def __post_init__(self) -> None:
        for name in ("latency", "overhead", "gap", "per_byte"):
            if not 0 <= (got := getattr(self, name)) < math.inf:
                raise ConfigurationError(
                    f"{name} of a LogGP link must be >= 0 s and finite, got {got}; 0 leaves it out"
                )

    def message(self, nbytes: float) -> float:
        """o + (k-1) G + L + o: seconds until a message of k bytes has been received."""
        return 2 * self.overhead + max(0.0, nbytes - 1) * self.per_byte + self.latency

    def stream(self, count: int, nbytes: float) -> float:
        """Seconds until the last of `count` messages of k bytes has been received; each begins (k-1) G + max(g, o)
        after the one before it.
        """
        return (count - 1) * self.occupied(nbytes) + self.message(nbytes) if count else 0.0

    def occupied(self, nbytes: float) -> float:
        """Seconds for which a message keeps the next one waiting: (k-1) G + max(g, o)."""
        return max(0.0, nbytes - 1) * self.per_byte + max(self.gap, self.overhead)

    def link(self, header: int = 0) -> Link:
        """The latency-bandwidth link with the same time for long messages: L + 2 o - G, and G a byte."""
        return Link(max(0.0, self.latency + 2 * self.overhead - self.per_byte), self.per_byte, header)


def of_link(link: Link) -> LogGP:
    """The LogGP link that takes as long for a message: no overheads, and no gap but that of the bytes."""
    return LogGP(
        link.latency + (1 + link.header) * link.per_byte, 0.0, (1 + link.header) * link.per_byte, link.per_byte
    )


def stream(link: Link, count: int, nbytes: float) -> float:
    """Seconds until the last of `count` messages of so many bytes, sent one after the other, has been received."""
    return link.latency + count * link.occupied(nbytes) if count else 0.0
