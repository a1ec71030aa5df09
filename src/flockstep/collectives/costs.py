"""What collectives cost on a network with a latency and a bandwidth, and where one overtakes another.

The model is that of Ben-Nun & Hoefler (2019) and Hoefler's slides on it: a message of b bytes
takes L + bG, every node sends one message and receives one at a time, and all do so at once. m is the number of bytes
of the array, P that of workers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flockstep.errors import ConfigurationError


@dataclass(frozen=True)
class Link:
    """The network: `latency` L in seconds, `per_byte` G in seconds; `header` bytes that each message has on top."""

    latency: float
    per_byte: float
    header: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.latency < math.inf and 0 < self.per_byte < math.inf and self.header >= 0):
            raise ConfigurationError(
                "a link needs a finite latency >= 0 s, finite seconds per byte > 0 and a header >= 0 bytes, got "
                f"{self.latency}, {self.per_byte} and {self.header}; 10 Gbit/s is 8e-10 s per byte"
            )

    def message(self, nbytes: float) -> float:
        """Seconds for one message of that payload."""
        return self.latency + self.occupied(nbytes)

    def occupied(self, nbytes: float) -> float:
        """Seconds for which one message of that payload keeps the sender's card busy."""
        return (nbytes + self.header) * self.per_byte


def doublings(workers: int) -> int:
    """⌊log2 P⌋."""
    return workers.bit_length() - 1


def halvings(workers: int) -> int:
    """⌈log2 P⌉: rounds in which a word reaches every worker."""
    return (workers - 1).bit_length()


def tree(workers: int, nbytes: float, link: Link) -> float:
    """2 L log2 P + 2 m G log2 P: reduce and broadcast along a binomial tree; with ⌈log2 P⌉ where P is no 2^k."""
    return 2 * halvings(workers) * link.message(nbytes)


def butterfly(workers: int, nbytes: float, link: Link) -> float:
    """L log2 P + m G log2 P: recursive doubling; where P is no 2^k, 2 L + 3 m G more for folding.

    Who folds meets the first message of the other rounds at its partner's card; hence 3 m G for two messages.
    """
    folds = 2 * link.message(nbytes) + link.occupied(nbytes) if _folds(workers) else 0
    return doublings(workers) * link.message(nbytes) + folds


def pipeline(workers: int, nbytes: float, link: Link) -> float:
    """2 L (P-1) + 2 m G (P-1)/P: a ring of chunks."""
    return 2 * (workers - 1) * link.message(nbytes / workers)


def halving_doubling(workers: int, nbytes: float, link: Link) -> float:
    """2 L log2 P + 2 m G (P-1)/P: reduce-scatter and gather; 2 L + 5/2 m G more where P is no 2^k."""
    rounds, power = doublings(workers), 1 << doublings(workers)
    share = nbytes * (power - 1) / power
    moved = 2 * (rounds * link.message(0) + share * link.per_byte)
    return moved + (2 * link.message(nbytes) + link.occupied(nbytes / 2) if _folds(workers) else 0)


def lower_bound(workers: int, nbytes: float, link: Link) -> float:
    """L log2 P + 2 m G (P-1)/P: no all-reduce takes less (Ben-Nun & Hoefler's T ≥ …), headers left out."""
    return link.latency * math.log2(workers) + 2 * nbytes * link.per_byte * (workers - 1) / workers


def crossover(workers: int, link: Link) -> float:
    """Bytes below which recursive doubling beats reduce-scatter and gather, for P = 2^k; infinite for P ≤ 2.

    m < L log2 P / (G (log2 P - 2 (P-1)/P)), L here with the header's time.

    Raises:
        ConfigurationError: P is no power of two.
    """
    if workers < 1 or _folds(workers):
        raise ConfigurationError(f"the crossover is known for a power of two of workers, got {workers}; take 4 or 8")
    rounds = doublings(workers)
    gain = rounds - 2 * (workers - 1) / workers
    return math.inf if gain <= 0 else link.message(0) * rounds / (link.per_byte * gain)


def _folds(workers: int) -> bool:
    """Whether P is no power of two, so that some workers fold their array into another's first."""
    return workers & (workers - 1) != 0
