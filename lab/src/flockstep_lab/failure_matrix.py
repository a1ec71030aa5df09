"""The failure matrix: what every strategy does if a worker dies, a message is lost or a worker is slow.

The rows are in `failure_matrix.toml`; `differences` compares a row with runs in virtual time. This command prints a new
row, to be checked against the method's paper and added to the file:

    python -m flockstep_lab.failure_matrix "easgd(period=4)"
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from importlib import resources

import msgspec

from flockstep.strategies.base import Strategy
from flockstep.strategies.traits import Delivery
from flockstep_lab import failures

CELLS: dict[str, Callable[[Strategy], str | dict[str, str]]] = {
    "equal": failures.replicas_equal,
    "dead": failures.dead_worker,
    "server": failures.dead_server,
    "lost": failures.lost_message,
    "slow": failures.slow_worker,
}
"""Field of `FailureRow` → function that observes the field's value in runs."""

WORDS = {
    failures.EVERY_STEP: "All workers compute each gradient on parameters that are equal bit for bit.",
    "every k steps": "All workers compute every k-th gradient on parameters that are equal bit for bit.",
    failures.DRAINED: "Replicas differ during training, and agree up to rounding when every update has arrived.",
    failures.COPIES: "Each replica is a copy of the servers' parameters at a different time.",
    failures.DRAWN: (
        "Exchanges bring replicas closer together, and gradients separate them; with lr = 0 replicas approach each "
        "other."
    ),
    failures.NEVER: (
        "Replicas stay apart, even with lr = 0: exchanges have an effect only through the learning rate, or no "
        "effect at all."
    ),
    failures.ENDS: "The run ends with an error that names the node that died, or the sender of the missing message.",
    failures.GOES_ON: "The other workers take all their steps without waiting; they end with different parameters.",
    failures.WAITS: (
        "The other workers wait for the dead worker until they are notified of its death; then they take all their "
        "steps."
    ),
    failures.EXACT: "The other workers take all their steps and end with the same parameters, up to rounding.",
    failures.STALLS: "No worker takes all its steps: all wait for a message that is never sent.",
    failures.GROUP_STALLS: "The workers of one group wait for each other and stall; all other workers take all steps.",
    failures.ONE_STALLS: "One worker waits forever; the other workers take all their steps.",
    failures.LATE_STALL: "All workers take all their steps; at the end one of them waits forever.",
    failures.LATE_END: (
        "All workers take all their steps; at the end one worker waits for a worker that has left, which ends the run."
    ),
    failures.NO_SERVER: "No process but the workers takes part.",
    failures.SERVER_EXACT: (
        "The backup continues; all workers take all their steps and end with the same parameters, bit for bit. Under "
        "asynchronous methods this holds because the workers are equally fast, so that updates keep their order."
    ),
    failures.SERVER_WAITS: (
        "The backup continues; all workers take all their steps, and end with other parameters, because their order "
        "changes."
    ),
    failures.SERVER_FREE: "The backup continues, and no worker has waited for it; workers end with other parameters.",
    failures.NO_EFFECT: "Every node ends with the same parameters, bit for bit.",
    failures.UPDATE_LOST: "All workers take all steps; one recorded update does not take effect on one of the nodes.",
    failures.UPDATES_LOST: (
        "All workers take all steps; the updates that were summed in the lost message do not take effect on one of the "
        "nodes."
    ),
    failures.CONTENT_LOST: "All workers take all steps; no recorded update is missing, but parameters differ.",
    failures.NO_MESSAGES: "No message carries an array.",
    failures.FREE: "All workers but one may be slow, and the remaining worker keeps its pace.",
    "no effect of up to b of n slow workers": (
        "With b slow workers the other workers keep their pace; with b + 1 they do not."
    ),
    failures.EVERYONE: "After at most two steps, every worker is as slow as the slow one.",
    "no effect for k steps, then all workers slow down": (
        "The other workers take k steps at their own pace, then slow down to the pace of the slow worker."
    ),
    failures.SPREADS: "Some workers slow down to the slow worker's pace at once, more distant workers later.",
    failures.GROUP: "Some workers slow down to the slow worker's pace, and the remaining workers keep their own pace.",
    failures.PARTLY: "The other workers slow down, but stay faster than the slow worker.",
}
"""Word in a cell of the failure matrix → explanation of the observation that it stands for. "…, up to b of n" is added
if b workers may die, but not b + 1.
"""


class FailureRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of the failure matrix: one strategy, and words for its behavior under each kind of fault."""

    strategy: str
    """The strategy as an expression."""
    equal: str
    """Words for how often all workers hold the same parameters."""
    dead: str
    """Words for what the other workers do when a worker dies."""
    lost: str | dict[str, str]
    """Words for what happens when one message with an array is lost; by kind of message if the kinds differ."""
    slow: str
    """Words for what happens to the other workers when each gradient of one worker takes s times as long."""
    server: str = failures.NO_SERVER
    """Words for what the workers do when a server that has a backup dies (`replicas=1`)."""
    why: str = ""
    """Explanation of the row, especially of differences from the published method."""

    @property
    def composed(self) -> Strategy:
        """The strategy, parsed from the expression in `strategy`."""
        return Strategy.parse(self.strategy)

    @property
    def delivery(self) -> Delivery:
        """The strategy's delivery guarantee, as its traits declare."""
        return self.composed.traits.delivery

    def words(self) -> Iterator[str]:
        """Every word that describes behavior in the row."""
        lost = [self.lost] if isinstance(self.lost, str) else self.lost.values()
        yield from (self.equal, self.dead, self.server, *lost, self.slow)


@cache
def rows() -> tuple[FailureRow, ...]:
    """Return all rows of the failure matrix.

    Raises:
        msgspec.ValidationError: the file is malformed.
    """
    text = resources.files("flockstep_lab").joinpath("failure_matrix.toml").read_text("utf-8")
    return tuple(msgspec.convert(tomllib.loads(text)["row"], list[FailureRow]))


def observed(strategy: str) -> FailureRow:
    """Run a strategy with each kind of fault, and return the row that describes the observations."""
    composed = Strategy.parse(strategy)
    words = {cell: observe(composed) for cell, observe in CELLS.items()}
    return msgspec.convert({"strategy": strategy, **words}, FailureRow)


def differences(row: FailureRow) -> list[str]:
    """Return sentences about the cells in which a row differs from the observed runs; empty if all cells agree."""
    seen = observed(row.strategy)
    return [
        f"{row.strategy}, {cell}: the matrix says {getattr(row, cell)!r}, observed {getattr(seen, cell)!r}"
        for cell in CELLS
        if getattr(row, cell) != getattr(seen, cell)
    ]


def as_toml(row: FailureRow) -> str:
    """Return a row as text in the format of the file."""
    lines = [f"{name} = {_toml(getattr(row, name))}" for name in row.__struct_fields__]
    return "\n".join(["[[row]]", *lines, ""])


def _toml(value: str | dict[str, str]) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return "{ " + ", ".join(f'"{kind}" = "{word}"' for kind, word in value.items()) + " }"


if __name__ == "__main__":
    for expression in sys.argv[1:]:
        sys.stdout.write(as_toml(observed(expression)))
