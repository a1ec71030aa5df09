"""Compares what the workers of a launched script report of equal steps: gradients, data, and settings of optimizers.

Workers report and never wait for a comparison. What differs although it must be equal ends the run; what may differ for
another reason than a mistake is said once on standard error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from typing import Any

from flockstep.errors import ConfigurationError
from flockstep.launchers.wait_monitor import on_stderr
from flockstep.messages import Address, Message
from flockstep.strategies.base import Strategy

KEPT = 64
"""Number of comparisons that are kept for workers that have not yet taken part in them."""
SAME_OPTIMIZER = "give all workers the same optimizer, and if one loads a saved state, let all of them load it"
EQUAL_VALUES = (
    "let schedules depend only on values that are equal on all workers, such as a loss that is evaluated inside of "
    "optimizer.consensus()"
)
"""Ways out for settings that differ at the start, and that have parted."""
Settings = list[Any]
"""The class of an optimizer, and the settings of each of its groups."""


class Comparisons:
    """What the workers of one run have reported, and what was said about it. Of replicas with several processes, those
    that hold the same part are compared.
    """

    def __init__(self, workers: int, strategy: Callable[[], Strategy | None], parts: int = 1):
        """`parts`: number of workers that hold one replica together."""
        self._workers, self._strategy, self._parts = workers // parts, strategy, parts
        self._reports: dict[Hashable, dict[Address, Any]] = {}
        """Kind of report with its step → worker → what it has reported."""
        self._sharded = False
        """Whether a worker reads its data through `flockstep.shard`."""
        self._said: set[str] = set()
        """Kinds of differences that were said."""

    def hear(self, message: Message) -> None:
        """Compare a worker's report with those of the others for the same step.

        Raises:
            ConfigurationError: the workers certainly read different data, or a setting differs that must be equal.
        """
        {"gradient": self._gradient, "data": self._data, "settings": self._settings}[message.tag](message)

    def _with(self, key: Hashable, source: Address, report: object) -> dict[Address, Any]:
        """The reports of a step, with that of `source`. A step that all workers have reported is forgotten, and the
        oldest one where too many wait for reports.
        """
        key = key, source % self._parts
        here = self._reports.setdefault(key, {})
        here[source] = report
        if len(here) == self._workers:
            del self._reports[key]
        elif len(self._reports) > KEPT:
            del self._reports[next(iter(self._reports))]
        return here

    def _gradient(self, message: Message) -> None:
        """Two workers draw the same batches if their first gradients, from equal parameters, are equal bit for bit."""
        step = int(message.note["step"])
        gradients = self._with(("gradient", step), message.source, str(message.note["gradient"]))
        if len(gradients) < self._workers or "gradient" in self._said:
            return
        groups: dict[str, list[str]] = {}
        for rank, gradient in sorted(gradients.items()):
            groups.setdefault(gradient, []).append(str(rank))
        way = (
            "give flockstep.shard at least as many different samples as there are workers, or use fewer workers"
            if self._sharded
            else "seed the random order of the data with flockstep.rank(), or give each worker a part of the data with "
            "flockstep.shard"
        )
        for gradient, ranks in groups.items():
            if gradient and len(ranks) > 1:  # an empty fingerprint equals no other
                self._said.add("gradient")
                named = f"{', '.join(ranks[:-1])} and {ranks[-1]}"
                on_stderr(
                    f"workers {named} computed the same gradient at step {step}, so they draw the same batches; {way}"
                )

    def _data(self, message: Message) -> None:
        """Digests of the data that the workers read through `flockstep.shard`."""
        note, self._sharded = message.note, True
        here = self._with(("data", str(note["of"]), int(note["step"])), message.source, str(note["digest"]))
        first = min(here)
        other = next((rank for rank in sorted(here) if here[rank] != here[first]), None)
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
        if "data" not in self._said:
            self._said.add("data")
            on_stderr(
                f"workers {first} and {other} read different data or read the data in a different order, and "
                "flockstep.shard gives each worker only a part of the data it reads, so some samples are left out or "
                "used several times; for data that differ between workers use flockstep.shard(…, private=True), "
                "otherwise read the same data in the same order on every worker (random augmentation alone does no "
                "harm)"
            )

    def _settings(self, message: Message) -> None:
        """Settings of the optimizers, at `distribute` and then every few steps.

        Settings may differ if each worker steps with its own gradient; if they part in the course of the run, standard
        error says so. Learning rates may also differ if servers apply each gradient alone, at the learning rate that
        its worker sends with it. At the start, a worker without a loaded state takes the settings that the worker of
        the lowest rank has loaded.
        """
        note, strategy = message.note, self._strategy()
        step, start = int(note["step"]), bool(note["start"])
        here = self._with(("settings", start, step), message.source, (message.payload.tobytes(), bool(note["loaded"])))
        if strategy is None or (start and len(here) < self._workers):
            return
        root, where = min(here), "" if start else f" at step {step}"
        for rank in sorted(here):
            (ours, loaded), (theirs, loads) = here[root], here[rank]
            if ours == theirs or (loaded and not loads):
                continue
            one, other, traits = json.loads(ours), json.loads(theirs), strategy.traits
            found, wrong = _difference(one, other), None
            if note["ends"] and (traits.alike or traits.server_optimizer):
                wrong = _difference(_ratios(one), _ratios(other)) if traits.own_rates else found
            if wrong is not None:
                name, first, second = wrong
                raise ConfigurationError(
                    f"{name} must be the same on all workers, because {_why(strategy)}, got {first} on worker {root} "
                    f"and {second} on worker {rank}{where}; {SAME_OPTIMIZER if start else EQUAL_VALUES}, or use a "
                    "strategy whose workers update their own parameters, such as local_sgd"
                )
            if found is not None and not start and "settings" not in self._said:
                name, first, second = found
                on_stderr(
                    f"{name} has changed to {first} on worker {root} and {second} on worker {rank}{where}; if this is "
                    f"not meant, {EQUAL_VALUES}"
                )
            if found is not None:  # settings that may differ from the start on are not told later
                self._said.add("settings")


def _difference(ours: Settings, theirs: Settings) -> tuple[str, Any, Any] | None:
    """Name of a setting that differs, and its values on two workers."""
    (kind, groups), (other, others) = ours, theirs
    if kind != other:
        return "the class of the optimizer", kind, other
    if len(groups) != len(others):
        return f"the number of parameter groups of {kind}", len(groups), len(others)
    for number, (a, b) in enumerate(zip(groups, others, strict=True)):
        for name in a | b:
            if a.get(name) != b.get(name):
                group = f" in group {number}" if len(groups) > 1 else ""
                return f"{name} of {kind}{group}", a.get(name), b.get(name)
    return None


def _ratios(settings: Settings) -> Settings:
    """The settings with each learning rate as a multiple of the largest one, which comes with every gradient."""
    kind, groups = settings
    largest = max((group["lr"] for group in groups if "lr" in group), default=0)
    ratios = [
        {"lr": float(f"{group['lr'] / largest:.12g}") if largest else 1.0} if "lr" in group else {} for group in groups
    ]
    return [kind, [group | ratio for group, ratio in zip(groups, ratios, strict=True)]]


def _why(strategy: Strategy) -> str:
    """Why the workers' settings must be equal."""
    if strategy.traits.alike:
        return f"all workers of {strategy} step along the same gradient"
    if strategy.traits.memory == "slices":
        return f"each worker of {strategy} updates a part of the common model"
    return f"the servers of {strategy} update the parameters for all workers"
