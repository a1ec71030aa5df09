"""Which updates entered a run's model between two evaluations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flockstep.arrays.namespace import copied, to_host
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, RunError
from flockstep.experiments.replay import Replay
from flockstep.messages import Address
from flockstep.nodes import Node
from flockstep.records.events import EvaluationEvent, Event, UpdateEvent
from flockstep.records.folder import RunFolder
from flockstep.records.tape import SnapshotEntry, read_tape, segments_of
from flockstep.runtime.replay import PLACE_SECONDS


@dataclass(frozen=True)
class Influence:
    """A change of a node's parameters, and the updates that made it."""

    node: Address
    step: int
    """Number of steps that the node had taken; 0 for a server."""
    sources: tuple[Address | None, ...]
    """Workers whose updates took effect; None stands for every other worker. Empty for a worker's own step, and for a
    change that the strategy does not attribute.
    """
    staleness: int | None
    """Largest staleness of the updates, in versions; None if it is not known."""
    norm: float
    """Euclidean norm of the change."""


@dataclass(frozen=True)
class Explanation:
    """What happened to a run's model between two of its evaluations."""

    before: EvaluationEvent
    after: EvaluationEvent
    influences: Sequence[Influence]
    """The changes, the largest first."""


def explain(folder: Path | str, step: float) -> Explanation:
    """Replay a run, and return which updates entered its model between the first evaluation after `step` steps or more
    and the evaluation before it.

    Raises:
        ConfigurationError: the record has no such evaluations, or cannot be replayed in one process.
        RunError: the replay differs from the run.
    """
    found = [event for event in RunFolder(folder).read_events() if isinstance(event, EvaluationEvent)]
    with Replay(folder) as replay:
        segments = segments_of(Path(folder))
        if len(segments) > 1:
            raise ConfigurationError(
                f"{folder} was resumed, or its workers changed, which is not explained yet; name another run"
            )
        tick = next((i for i, event in enumerate(found) if event.step >= step), 0)
        if tick < 1:
            last = found[-1].step if found else 0
            raise ConfigurationError(
                f"step must be > 0 and <= {last:g}, the step of the run's last evaluation, got {step:g}; name a step "
                "between them"
            )
        watch = _ModelChanges(_windows(segments[0], tick, replay.config.result == "server"))
        replay.stage.watched, replay.stage.heard = watch.look, watch.hear
        replay.run()
        if replay.difference is not None:
            raise RunError(f"the replay differs from the run: {replay.difference}")
    return Explanation(found[tick - 1], found[tick], watch.influences())


def _windows(folder: Path, tick: int, servers: bool) -> dict[Address, range]:
    """Node that holds the model → its places between the two evaluations."""
    windows = {}
    for path in folder.glob("server-*.tape" if servers else "worker-*.tape"):
        header, entries = read_tape(path)
        at = {entry.tick: entry.place for entry in entries if isinstance(entry, SnapshotEntry)}
        if tick - 1 in at:
            end = next((place for number, place in sorted(at.items()) if number >= tick), at[tick - 1])
            windows[header.node] = range(at[tick - 1], end + 1)
    return windows


class _ModelChanges:
    """Measures changes of parameters, place by place."""

    def __init__(self, windows: dict[Address, range]):
        self._windows = windows
        self._last: dict[Address, FlatArray] = {}
        self._changes: dict[tuple[Address, int], tuple[int, float]] = {}
        self._updates: defaultdict[tuple[Address, int], list[UpdateEvent]] = defaultdict(list)

    def look(self, node: Node, place: int) -> None:
        """Measure how the parameters have changed since the node's last turn."""
        if place not in self._windows.get(node.address, ()):
            return
        now = copied(to_host(node.params))
        if (before := self._last.get(node.address)) is not None:
            norm = float(np.linalg.norm(now - before))
            if norm:
                self._changes[node.address, place] = node.run_step, norm
        self._last[node.address] = now

    def hear(self, event: Event) -> None:
        """Note an update, whose time is its place."""
        if isinstance(event, UpdateEvent):
            self._updates[event.node, round(event.seconds / PLACE_SECONDS)].append(event)

    def influences(self) -> list[Influence]:
        """Return the changes, the largest first."""
        found = []
        for (node, place), (step, norm) in self._changes.items():
            updates = self._updates[node, place]
            staleness = max((one.staleness for one in updates if one.staleness is not None), default=None)
            found.append(Influence(node, step, tuple(one.source for one in updates), staleness, norm))
        return sorted(found, key=lambda one: -one.norm)
