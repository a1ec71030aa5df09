"""Invariants of a disrupted run, which are checked on the record after the run has ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from flockstep.errors import FlockstepError
from flockstep.messages import Address, node_name, server
from flockstep.records import checkpoints as disk
from flockstep.records.events import Event, StepEvent, UpdateEvent
from flockstep.records.summary import Summary
from flockstep.runtime.cut import read_cut
from flockstep_lab.chaos.base import Expected, Setting


@dataclass(frozen=True)
class RunHistory:
    """Everything that the invariants are checked on, collected after a run has ended: events, summary, exit codes and
    leftovers.
    """

    setting: Setting
    expected: Expected
    events: Sequence[Event]
    summary: Summary | None
    codes: Sequence[int]
    """Exit code of each command: of `train`, and of `resume` if the run was resumed."""
    fired: bool = True
    hangs: bool = False
    err: str = ""
    result: bytes | None = None
    """Bytes of the model that the run produced; None if the run has none."""
    baseline: bytes | None = None
    """Bytes of the model of a run with the same seed that was not disrupted."""
    left: Sequence[str] = ()
    """Processes and files that the run has left behind after its end."""
    record: Path | None = None
    """Folder of the run's record, with the checkpoints."""
    lost: frozenset[int] = field(default_factory=frozenset)
    """Nodes that the first command reported as lost, before any `flockstep resume`."""


def disruption_fires(history: RunHistory) -> Iterator[str]:
    """The disruption happens before the run ends."""
    if not history.fired:
        yield "the disruption did not happen before the run ended"


def ends_as_expected(history: RunHistory) -> Iterator[str]:
    """The commands end with the expected exit codes, and the run reports exactly the nodes that were lost."""
    expected, summary = history.expected, history.summary
    if history.hangs:
        yield "a command of the run did not end"
        return
    if history.codes[0] not in expected.codes:
        yield f"the command ended with exit code {history.codes[0]}, not {expected.codes[0]}: {_last(history.err)}"
    if history.lost != expected.lost:
        yield f"lost nodes: {_named(history.lost)}, expected: {_named(expected.lost)}"
    if expected.says not in history.err:
        yield f"the command did not report {expected.says} on standard error: {_last(history.err)}"
    if expected.resumes and history.codes[1:] != [0]:
        yield f"the resumed run ended with exit code {history.codes[1:]}: {_last(history.err)}"
    if summary is None:
        yield "the run has no summary"
    elif summary.status != "finished" and (expected.codes == (0,) or expected.resumes):
        yield f"the run is {summary.status}: {summary.error}"
    elif sum(one.refused for one in summary.per_worker) != expected.refused:
        yield f"{sum(one.refused for one in summary.per_worker)} gradients were refused, not {expected.refused}"


def steps_monotone(history: RunHistory) -> Iterator[str]:
    """The record has each step of every worker once, in order of time, and all steps of workers that survived."""
    for rank, steps in _steps(history).items():
        numbers = [event.step for event in steps]
        if numbers != sorted(set(numbers)):
            yield f"worker {rank}: step {_first_wrong(numbers)} is repeated or out of order in the record"
        if any(one.seconds > other.seconds for one, other in pairwise(sorted(steps, key=lambda event: event.step))):
            yield f"worker {rank}: a later step has an earlier time"
        whole = history.setting.strategy.traits.fixed_steps and rank not in _dead(history) and _finished(history)
        if whole and len(set(numbers)) != history.setting.steps:
            yield f"worker {rank}: {len(set(numbers))} of {history.setting.steps} steps are in the record"


def updates_once(history: RunHistory) -> Iterator[str]:
    """No node applies more updates of a worker than the number of steps that the worker has taken."""
    taken = {rank: len(steps) for rank, steps in _steps(history).items()}
    for (node, source), count in sorted(_applied(history).items()):
        # The last steps of a killed worker may be missing from the record.
        if source not in _dead(history) and count > taken.get(source, 0):
            yield (
                f"{node_name(node)} applied {count} updates of worker {source}, which took {taken.get(source, 0)} steps"
            )


def acknowledged_once(history: RunHistory) -> Iterator[str]:
    """If no update may be dropped, each server with backups applies every update of a surviving worker exactly once."""
    strategy, applied = history.setting.strategy, _applied(history)
    if not strategy.replicas or strategy.traits.delivery == "partial" or not applied or not _finished(history):
        return
    everyone: Counter[Address] = Counter()
    for event in history.events:
        if isinstance(event, UpdateEvent) and event.source is None:
            everyone[event.node] += event.count
    for rank, steps in _steps(history).items():
        for node in map(server, range(history.setting.servers)):
            count = applied[node, rank] + everyone[node]
            if rank not in _dead(history) and count != len(steps):
                yield f"{node_name(node)} applied {count} of {len(steps)} updates of worker {rank}"


def staleness_bounded(history: RunHistory) -> Iterator[str]:
    """No update has a larger staleness than the strategy allows."""
    bound = history.setting.strategy.most_stale(history.setting.workers)
    seen = [e.staleness for e in history.events if isinstance(e, UpdateEvent) and e.staleness is not None]
    if bound is not None and seen and max(seen) > bound:
        yield f"an update has staleness {max(seen)}, but {history.setting.strategy} allows {bound}"


def mass_conserved(history: RunHistory) -> Iterator[str]:
    """In every checkpoint, the mass (push-sum weight) of all workers and of the unread messages sums to its initial
    total; after the loss of a worker, to no more.
    """
    for folder in [] if history.record is None else disk.folders(history.record):
        if (folder / disk.MANIFEST).exists():
            yield from _mass_in(folder, history)


def bits_equal(history: RunHistory) -> Iterator[str]:
    """A synchronous run in which no worker died ends with the same model bits as a run without a disruption."""
    synchronous = history.setting.strategy.traits.delivery == "synchronous"
    if not synchronous or not _finished(history) or _dead(history) or history.expected.refused:
        return
    if history.result is None or history.result != history.baseline:
        yield "the resulting model differs from the model of the baseline run"


def nothing_left(history: RunHistory) -> Iterator[str]:
    """The run leaves behind no process, and therefore no shared memory or open file of a process, and no socket."""
    if history.left:
        yield f"left behind: {', '.join(history.left)}"


INVARIANTS: tuple[Callable[[RunHistory], Iterator[str]], ...] = (
    disruption_fires,
    ends_as_expected,
    steps_monotone,
    updates_once,
    acknowledged_once,
    staleness_bounded,
    mass_conserved,
    bits_equal,
    nothing_left,
)


def broken(history: RunHistory) -> list[str]:
    """Return sentences about the invariants that a run has violated; each begins with the name of the invariant."""
    return [f"{check.__name__}: {sentence}" for check in INVARIANTS for sentence in check(history)]


def _finished(history: RunHistory) -> bool:
    return history.summary is not None and history.summary.status == "finished"


def _dead(history: RunHistory) -> frozenset[int]:
    """Workers that were lost and did not come back with `resume`."""
    return frozenset() if history.expected.resumes else history.lost


def _applied(history: RunHistory) -> Counter[tuple[Address, int]]:
    """(node, rank) → number of updates of worker `rank` that the node applied, as the record says."""
    applied: Counter[tuple[Address, int]] = Counter()
    for event in history.events:
        if isinstance(event, UpdateEvent) and event.source is not None:
            applied[event.node, event.source] += event.count
    return applied


def _steps(history: RunHistory) -> dict[int, list[StepEvent]]:
    """Rank → steps of the worker, in the order of the record."""
    found: dict[int, list[StepEvent]] = {rank: [] for rank in range(history.setting.workers)}
    for event in history.events:
        if isinstance(event, StepEvent):
            found.setdefault(event.rank, []).append(event)
    return found


def _first_wrong(numbers: Sequence[int]) -> int:
    return next(other for one, other in pairwise(numbers) if other <= one)


def _mass_in(folder: Path, history: RunHistory) -> Iterator[str]:
    try:
        checkpoint = disk.Checkpoint(folder, disk.read_manifest(folder))
        saved = [
            read_cut(checkpoint, shard.node, script=False) for shard in checkpoint.manifest.shards if shard.node >= 0
        ]
    except FlockstepError as error:
        yield f"{folder.name}: {error}"
        return
    boxes = [one.mailbox for one in saved if one.mailbox is not None]
    waiting = [message for box in boxes for queue in box.queues.values() for _, message in queue]
    waiting += [message for one in saved for taken in one.taken.values() for message in taken]
    mass = history.setting.strategy.mass([one.state for one in saved], waiting)
    if mass is None:
        return
    most = " at most" if checkpoint.manifest.lost else ""  # a worker that was lost took its mass with it
    if mass[0] > mass[1] or (mass[0] < mass[1] and not most):
        yield f"checkpoint {folder.name}: the mass (push-sum weight) is {mass[0]} instead of{most} {mass[1]}"


def _named(nodes: frozenset[int]) -> str:
    return ", ".join(map(node_name, sorted(nodes))) or "none"


def _last(text: str) -> str:
    """The last line of a text that says something."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")
