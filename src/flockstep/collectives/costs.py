"""Models of the time that collectives take on a network with a latency and a bandwidth.

The model is that of Ben-Nun & Hoefler (2019) and of Hoefler's slides: a message of b bytes takes L + bG, every node
sends one message and receives one at a time, and all nodes do so at the same time. m is the number of bytes of the
array, P the number of workers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flockstep.errors import ConfigurationError


@dataclass(frozen=True)
class LinkModel:
    """A link model: `latency` L in seconds, `per_byte` G in seconds per byte, and `header` bytes added to each
    message.
    """

    latency: float
    per_byte: float
    header: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.latency < math.inf and 0 < self.per_byte < math.inf and self.header >= 0):
            raise ConfigurationError(
                "a link needs a finite latency >= 0 s, finite seconds per byte > 0 and a header >= 0 bytes, got "
                f"{self.latency}, {self.per_byte} and {self.header}; for 10 Gbit/s use 8e-10 s per byte"
            )

    def message(self, nbytes: float) -> float:
        """Return the seconds that one message with a payload of `nbytes` bytes takes."""
        return self.latency + self.occupied(nbytes)

    def occupied(self, nbytes: float) -> float:
        """Return the seconds for which one message with a payload of `nbytes` bytes occupies the sender's
        network card.
        """
        return (nbytes + self.header) * self.per_byte


def doublings(workers: int) -> int:
    """Return ⌊log2 P⌋, the exponent of the largest power of two up to P."""
    return workers.bit_length() - 1


def halvings(workers: int) -> int:
    """Return ⌈log2 P⌉, the number of rounds in which a message can reach every worker."""
    return (workers - 1).bit_length()


def tree(workers: int, nbytes: float, link: LinkModel) -> float:
    """Return the seconds of a reduce and a broadcast along a binomial tree on P workers, for an array of m bytes on a
    link of latency L and G seconds per byte: 2 ⌈log2 P⌉ (L + m G).
    """
    return 2 * halvings(workers) * link.message(nbytes)


def butterfly(workers: int, nbytes: float, link: LinkModel) -> float:
    """Return the seconds of recursive doubling on P workers, for an array of m bytes on a link of latency L and G
    seconds per byte: (L + m G) log2 P; if P is not a power of two, folding adds 2 L + 3 m G.

    Folding adds two messages, but 3 m G: the folded array and the first message of the other rounds arrive at the same
    network card.
    """
    folds = 2 * link.message(nbytes) + link.occupied(nbytes) if _folds(workers) else 0
    return doublings(workers) * link.message(nbytes) + folds


def pipeline(workers: int, nbytes: float, link: LinkModel) -> float:
    """Return the seconds of an all-reduce around a ring of P workers, for an array of m bytes on a link of latency L
    and G seconds per byte: 2 (P-1) (L + m G / P).
    """
    return 2 * (workers - 1) * link.message(nbytes / workers)


def halving_doubling(workers: int, nbytes: float, link: LinkModel) -> float:
    """Return the seconds of a reduce-scatter by halving and a gather by doubling on P workers, for an array of m bytes
    on a link of latency L and G seconds per byte: 2 L log2 P + 2 m G (P-1)/P; if P is not a power of two, folding adds
    2 L + 5/2 m G.
    """
    rounds, power = doublings(workers), 1 << doublings(workers)
    share = nbytes * (power - 1) / power
    moved = 2 * (rounds * link.message(0) + share * link.per_byte)
    return moved + (2 * link.message(nbytes) + link.occupied(nbytes / 2) if _folds(workers) else 0)


def lower_bound(workers: int, nbytes: float, link: LinkModel) -> float:
    """Return a lower bound on the seconds of every all-reduce of m bytes on P workers, without headers: L log2 P + 2 m
    G (P-1)/P for latency L and G seconds per byte (Ben-Nun & Hoefler 2019).
    """
    return link.latency * math.log2(workers) + 2 * nbytes * link.per_byte * (workers - 1) / workers


def _folds(workers: int) -> bool:
    """Whether P is not a power of two, so that some workers first fold their array into that of another."""
    return workers & (workers - 1) != 0
