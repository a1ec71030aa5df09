"""Compares what the workers of a launched script report: warns about workers that draw the same batches, and refuses
workers that read different data although all should read the same data.

Two workers draw the same batches if their first gradients, from equal parameters, are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flockstep.errors import ConfigurationError
from flockstep.launchers.wait_monitor import on_stderr
from flockstep.messages import Address, Message


@dataclass
class GradientFingerprints:
    """Fingerprints of the first gradients of all workers of a launched script, by step."""

    workers: int
    sharded: Callable[[], bool] = lambda: False
    """Whether the workers read their data through `flockstep.shard`."""
    reported: bool = False
    shown: dict[int, dict[Address, str]] = field(default_factory=dict)

    def hear(self, message: Message) -> None:
        """Store a worker's gradient fingerprint of a step.

        When all workers have sent a fingerprint, warn on standard error about equal fingerprints.
        """
        step = int(message.note["step"])
        gradients = self.shown.setdefault(step, {})
        gradients[message.source] = str(message.note["gradient"])
        if len(gradients) < self.workers or self.reported:
            return
        alike = alike_among(gradients)
        self.reported = bool(alike)
        for ranks in alike:
            on_stderr(warning(ranks, step, self.sharded()))


KEPT = 64
"""Number of comparisons that are kept for workers that have not yet taken part in them."""


@dataclass
class DataDigests:
    """Digests of the data that the workers of a launched script read through `flockstep.shard`."""

    workers: int
    heard: bool = False
    """Whether a worker reads its data through `flockstep.shard`."""
    reported: bool = False
    shown: dict[tuple[str, int], dict[Address, str]] = field(default_factory=dict)
    """(kind of digest with its loader, step of the run) → digest of each worker."""

    def hear(self, message: Message) -> None:
        """Store the digest of the data that a worker reads, and compare it with those of the other workers for the same
        step. If a digest may differ for another reason than a mistake, standard error says once that it differs.

        Raises:
            ConfigurationError: the workers certainly read different data.
        """
        note, self.heard = message.note, True
        key = str(note["of"]), int(note["step"])
        here = self.shown.setdefault(key, {})
        here[message.source] = str(note["digest"])
        first = min(here)
        other = next((rank for rank in sorted(here) if here[rank] != here[first]), None)
        if len(here) == self.workers or len(self.shown) > KEPT:
            del self.shown[key if len(here) == self.workers else next(iter(self.shown))]
        if other is None:
            return
        if note["certain"]:
            raise ConfigurationError(
                f"flockstep.shard divides data that all workers hold, but workers {first} and {other} hold different "
                f"data, got {here[first]} on worker {first} and {here[other]} on worker {other}; make each data set "
                "without flockstep.rank() and with the same seed on every worker, as in random_split(…, "
                "generator=torch.Generator().manual_seed(0)), shard the same loaders in the same order, or use "
                "flockstep.shard(…, private=True) for data that only one worker has"
            )
        if not self.reported:
            self.reported = True
            on_stderr(
                f"workers {first} and {other} read different data or read the data in a different order, and "
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
