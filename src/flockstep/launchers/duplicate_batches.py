"""Warns about workers of a launched script that draw the same batches, that read different data although all should
read the same data, or that use different learning rates.

Two workers draw the same batches if their first gradients, from equal parameters, are equal bit for bit. Learning rates
are compared if the strategy must keep replicas equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flockstep.launchers.wait_monitor import on_stderr
from flockstep.messages import Address, Fields


@dataclass
class GradientFingerprints:
    """Fingerprints of the first gradients of all workers of a launched script, by step."""

    workers: int
    sharded: Callable[[], bool] = lambda: False
    """Whether the workers read their data through `flockstep.shard`."""
    reported: bool = False
    rates_reported: bool = False
    shown: dict[int, dict[Address, str]] = field(default_factory=dict)
    rates: dict[int, dict[Address, float]] = field(default_factory=dict)

    def hear(self, address: Address, note: Fields) -> None:
        """Store a worker's gradient fingerprint of a step.

        When all workers have sent a fingerprint, warn on standard error about equal fingerprints.
        """
        step = int(note["step"])
        gradients = self.shown.setdefault(step, {})
        gradients[address] = str(note["gradient"])
        rates = self.rates.setdefault(step, {})
        rates[address] = float(note["lr"])
        if len(gradients) < self.workers:
            return
        self._compare(rates, step)
        if self.reported:
            return
        alike = alike_among(gradients)
        self.reported = bool(alike)
        for ranks in alike:
            on_stderr(warning(ranks, step, self.sharded()))

    def _compare(self, rates: dict[Address, float], step: int) -> None:
        """Warn if learning rates differ; a rate of 0 is not used for a step and is ignored."""
        used = sorted((rank, lr) for rank, lr in rates.items() if lr)
        other = next((each for each in used if each[1] != used[0][1]), None)
        if other is not None and not self.rates_reported:
            self.rates_reported = True
            on_stderr(
                f"workers step with different learning rates at step {step}, {used[0][1]:g} on worker {used[0][0]} "
                f"and {other[1]:g} on worker {other[0]}, so their parameters diverge; use one schedule on "
                "all ranks, and in a script that resumes, load the scheduler's state on every rank"
            )


@dataclass
class DataDigests:
    """Digests of the data that the workers of a launched script read through `flockstep.shard`."""

    workers: int
    shown: dict[Address, str] = field(default_factory=dict)

    def hear(self, address: Address, note: Fields) -> None:
        """Store the digest of the data that a worker reads.

        When all workers have sent a digest, warn on standard error if the digests differ.
        """
        self.shown[address] = str(note["digest"])
        other = next((rank for rank, digest in sorted(self.shown.items()) if digest != self.shown.get(0)), None)
        if len(self.shown) == self.workers and other is not None:
            on_stderr(
                f"workers 0 and {other} read different data or read the data in a different order, and "
                "flockstep.shard gives each worker only a part of the data it reads, so some samples are left out or "
                "used several times; for data that differ between workers use flockstep.shard(…, private=True), "
                "otherwise read the same data in the same order on every worker (random augmentation alone does no "
                "harm)"
            )


def alike_among(gradients: dict[Address, str]) -> list[list[Address]]:
    """Return the groups of workers whose gradients have equal fingerprints; an empty fingerprint equals no other."""
    groups: dict[str, list[Address]] = {}
    for address, gradient in sorted(gradients.items()):
        groups.setdefault(gradient, []).append(address)
    return [ranks for gradient, ranks in groups.items() if gradient and len(ranks) > 1]


def warning(ranks: list[Address], step: int, sharded: bool = False) -> str:
    """Return the warning about workers with equal gradients, with the way out.

    `sharded` says whether the workers use `flockstep.shard`.
    """
    named = f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
    way = (
        "give flockstep.shard at least as many different samples as there are workers, or use fewer workers"
        if sharded
        else "seed the random order of the data with flockstep.rank(), or give each worker a part of the data with "
        "flockstep.shard"
    )
    return f"workers {named} computed the same gradient at step {step}, so they draw the same batches; {way}"
