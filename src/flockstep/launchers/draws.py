"""Notices that workers draw the same batches: their first gradients, from equal parameters, have the same bits.

And that their learning rates differ, where replicas are to stay equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flockstep.launchers.waits import on_stderr
from flockstep.messages import Address, Fields


@dataclass
class Draws:
    """Fingerprints of the first gradients of all workers of a launched script, by step."""

    workers: int
    told: bool = False
    told_of_rates: bool = False
    shown: dict[int, dict[Address, str]] = field(default_factory=dict)
    rates: dict[int, dict[Address, float]] = field(default_factory=dict)

    def hear(self, address: Address, note: Fields) -> None:
        """A worker shows the gradient of a step; once all have shown it, say on standard error who drew the same."""
        step = int(note["step"])
        gradients = self.shown.setdefault(step, {})
        gradients[address] = str(note["gradient"])
        rates = self.rates.setdefault(step, {})
        rates[address] = float(note["lr"])
        if len(gradients) < self.workers:
            return
        self._compare(rates, step)
        if self.told:
            return
        alike = alike_among(gradients)
        self.told = bool(alike)
        for ranks in alike:
            on_stderr(warning(ranks, step))

    def _compare(self, rates: dict[Address, float], step: int) -> None:
        """Say which learning rates differ; 0 is one that counts for nothing."""
        used = sorted((rank, lr) for rank, lr in rates.items() if lr)
        other = next((each for each in used if each[1] != used[0][1]), None)
        if other is not None and not self.told_of_rates:
            self.told_of_rates = True
            on_stderr(
                f"workers step with different learning rates at step {step}, {used[0][1]:g} on worker {used[0][0]} and "
                f"{other[1]:g} on worker {other[0]}, so that their parameters part; load the state of a scheduler on "
                "every rank, before or after distribute"
            )


def alike_among(gradients: dict[Address, str]) -> list[list[Address]]:
    """The groups of workers with equal gradients; gradients of nothing ("") are equal to none."""
    groups: dict[str, list[Address]] = {}
    for address, gradient in sorted(gradients.items()):
        groups.setdefault(gradient, []).append(address)
    return [ranks for gradient, ranks in groups.items() if gradient and len(ranks) > 1]


def warning(ranks: list[Address], step: int) -> str:
    """What is wrong where these workers have the same gradient, and the way out."""
    named = f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
    return (
        f"workers {named} computed the same gradient at step {step}, so they draw the same batches; seed the drawing "
        "of batches by flockstep.rank(), or give each worker its part with flockstep.shard"
    )
