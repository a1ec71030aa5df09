"""Batches that are drawn epoch by epoch, with separate random numbers for each epoch.

All workers must draw the order of an epoch with the same seed, although one of them may look at some batches alone. The
seed therefore depends on what all workers have in common: what identifies the data, the number of loaders in use for
these data, and the number of passes in which the optimizer has taken steps. A loader that one worker alone has made for
other data changes no order.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import sys
import warnings
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

import numpy as np

from flockstep.arrays.namespace import is_tensor, to_host
from flockstep.errors import ConfigurationError
from flockstep.messages import Fields
from flockstep.runtime.node_spec import place_now, seed_of_script
from flockstep.runtime.session import newest_session, sessions_here, steps_here

B = TypeVar("B")
MOST = 1 << 16
"""Maximum number of bytes of each array that enter the digest of a batch; further bytes are ignored."""
APART = 1_000_003
"""Difference between the seeds of two loaders in use for equal data; no loader has as many epochs."""
DATA = 1 << 31
"""Difference between the seeds of two kinds of data, in units of a checksum of 32 bits."""
LARGEST = 1 << 63
"""Bound of the seeds of torch's generators."""
LOADERS = 1009
"""Difference between the seeds of two runs, in units of `APART`; no script has as many loaders in use."""


class EpochCount:
    """Counts the epochs of an iterable: the passes over it in which the process has taken steps of a run.

    Without a run, every pass that was read beyond its first batch is an epoch.
    """

    def __init__(self, data: str = "", place: int = 0):
        """`data`: what identifies the data; `place`: number of the iterable among those in use for them, from 0."""
        self.number = 0
        """Number of the iterable among all in use, by which the supervisor finds what other workers say of it."""
        self.seed = _seed_of(data, place)
        """Seed of epoch 0; that of a later epoch is larger by the number of the epoch."""
        self._next = 0
        self._read = False
        """Whether the last pass was read beyond its first batch."""
        self._reading = 0
        """Number of passes that have been read beyond their first batch, and not yet to their end."""
        self._steps: int | None = None
        """Steps of the process when a pass last looked; None if there was no run."""

    def go_on(self, number: int) -> None:
        """Set the number of the next epoch."""
        self._next, self._read = number, False

    def counted(self, batches: Callable[[int], Iterator[B]]) -> Iterator[B]:
        """Yield one pass over `batches(number)`, where `number` is that of the epoch."""
        steps, read = steps_here(), False
        # steps with batches that were all read before; steps during a pass that is still read belong to that pass
        if self._read and not self._reading and (steps is None or steps != self._steps):
            self._next += 1
        number, self._read, self._steps = self._next, False, steps
        _passes.append(self)
        try:
            for batch in batches(number):
                yield batch
                self._reading += not read
                self._read = read = True
                steps = self._note(number, steps)
        finally:
            _passes.remove(self)
            self._reading -= read
            self._note(number, steps)

    def _note(self, number: int, before: int | None) -> int | None:
        """Count the pass over epoch `number` if there were steps since it last looked; return the number of steps."""
        if (steps := steps_here()) != before:
            self._steps, self._next = steps, max(self._next, number + 1)
        return steps


_former: list[tuple[int, tuple[int, int]]] = []
"""Largest number of the process's steps at which a pass still begins with a former place, and this place."""


def deal_as_before(steps: int, place: tuple[int, int] | None) -> None:
    """Let passes that begin before the next step have the place before the workers changed: other workers, which had
    completed this step earlier, have begun them so. None: no worker has begun one, as when a worker joins.
    """
    if place is None:
        _former.clear()
    elif not _former or _former[-1][0] < steps:
        _former[:] = [(steps, place)]


def place_of_pass(rank: int, workers: int) -> tuple[int, int]:
    """Return the place of this worker in a pass that begins now; the arguments are the place until now."""
    for steps, place in _former:
        if (steps_here() or 0) <= steps:
            return place
    return place_now(rank, workers)


_passes: list[EpochCount] = []
"""A counter for each pass that has begun and not ended."""


def deals_data() -> bool:
    """Return whether the script is in the middle of a pass over a part of its data, which was dealt when it began."""
    return bool(_passes)


_counts: dict[tuple[str, int], EpochCount] = {}
"""The counters by data and place; the counter of a loader that is no longer in use goes on with the next loader in its
place, so that a loader that is made anew for each epoch draws another order in each.
"""
_places: weakref.WeakKeyDictionary[Iterable[Any], tuple[str, int]] = weakref.WeakKeyDictionary()
"""Iterable in use → its data and place."""


def count_of(batches: Iterable[Any], data: str = "") -> EpochCount:
    """Return the epoch counter of an iterable over `data`, the same object at each call.

    Lists and similar iterables, whose order never changes, get a new counter at each call.
    """
    try:
        key = _places.get(batches)
        if key is None:
            if any(of == data for of, _ in _places.values()):
                gc.collect()  # a loader in a reference cycle may have been freed on some workers only
            taken = set(_places.values())
            key = next((data, n) for n in itertools.count() if (data, n) not in taken)
            count = _counts.setdefault(key, EpochCount(*key))
            numbers = {_counts[other].number for other in taken}
            count.seed, count.number = _seed_of(*key), next(n for n in itertools.count() if n not in numbers)
            _places[batches] = key
    except TypeError:  # no weak references, or no hash
        return EpochCount()
    return _counts[key]


def _seed_of(data: str, place: int) -> int:
    """Seed of epoch 0 of the loader in a place; runs with different seeds draw different orders."""
    return (DATA * zlib.crc32(data.encode()) + APART * (place + LOADERS * seed_of_script())) % LARGEST


def epochs_of(part: Any) -> EpochCount:
    """Return the epoch counter of a worker's part of a loader or iterable."""
    count: EpochCount = part._epochs
    return count


class EpochBatches(ABC, Generic[B]):
    """A worker's batches of an iterable, epoch by epoch; other attributes are those of the iterable."""

    def __init__(self, batches: Iterable[B], rank: int, workers: int, count: EpochCount):
        self._batches = batches
        self._rank = rank
        self._workers = workers
        self._epochs = count

    def __iter__(self) -> Iterator[B]:
        """Yield the batches of one epoch, for this worker's place in the run when it begins."""
        self._rank, self._workers = place_of_pass(self._rank, self._workers)
        return self._epochs.counted(self.of_epoch)

    @abstractmethod
    def of_epoch(self, epoch: int) -> Iterator[B]:
        """Yield the batches of the epoch with the given number."""

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self._batches, name)


def drawn(batches: Iterable[B], seed: int) -> Iterator[B]:
    """Iterate over `batches` with torch's global generator seeded by `seed` alone, even if the script seeds the
    generator by rank.
    """
    torch = sys.modules.get("torch")
    if torch is None:  # nothing draws from it
        yield from batches
        return
    state, iterator, end = torch.Generator().manual_seed(seed).get_state(), None, object()
    while True:
        own = torch.get_rng_state()
        torch.set_rng_state(state)
        try:
            iterator = iter(batches) if iterator is None else iterator
            batch: Any = next(iterator, end)
        finally:
            state = torch.get_rng_state()
            torch.set_rng_state(own)
        if batch is end:
            return
        yield batch


class ShardedBatches(EpochBatches[B]):
    """Batches i, i + n, i + 2n, … of an iterable, for worker i of n; every worker gets the same number of batches."""

    what = "batches"
    """What the iterable yields."""
    certain = False
    """Whether all workers must read equal values; batches may contain random changes of each worker."""
    _told = _warned = False

    def of_epoch(self, epoch: int) -> Iterator[B]:
        """Yield this worker's batches of one epoch.

        Raises:
            ConfigurationError: there are batches, but fewer than workers.
        """
        return self.in_order(self._epochs.seed + epoch)

    def in_order(self, seed: int) -> Iterator[B]:
        """Yield this worker's batches in the order that is drawn with the given seed."""
        batches, turns = drawn(self._batches, seed), 0
        while len(turn := list(itertools.islice(batches, self._workers))) == self._workers:
            if not turns:
                self._compare(turn)
            yield turn[self._rank]
            turns += 1
        if turn and not turns:
            raise ConfigurationError(
                f"flockstep.shard gives each of {self._workers} workers the same number of {self.what}, but the epoch "
                f"has only {len(turn)}; use at most {len(turn)} workers, or smaller batches"
            )
        if turn and not self._told and self._rank == 0:
            self._told = True
            warnings.warn(
                f"flockstep.shard leaves out the last {len(turn)} {self.what} of an epoch because all {self._workers} "
                f"workers must take the same number of steps; yield a multiple of {self._workers} {self.what}, or let "
                "each worker read different data, with private=True",
                UserWarning,
                stacklevel=2,
            )

    def _compare(self, turn: list[B]) -> None:
        """Compare the first batches of an epoch with those of other workers, and of other loading processes."""
        digests = list(map(digest_of, turn))
        tell_data(self._epochs.number, self.what, " ".join(digests), self.certain)
        loading = getattr(self._batches, "num_workers", 0)
        if loading > 1 and self._rank == 0 and digests[:1] == digests[1:2] and not self._warned:
            self._warned = True
            warnings.warn(
                f"the {loading} processes of the loader read the same batches, so every sample occurs {loading} times "
                "in an epoch; let the __iter__ of the data set yield a different part in each process, with "
                "torch.utils.data.get_worker_info()",
                UserWarning,
                stacklevel=3,
            )

    def __len__(self) -> int:
        return len(self._batches) // self._workers  # type: ignore[arg-type]


class PrivateBatches(EpochBatches[B]):
    """All batches of an iterable that this worker alone has.

    A worker whose batches run out takes part in the steps of the other workers until every worker has used all of its
    batches, as under `optimizer.join()`: every batch is used exactly once in an epoch, and all workers begin the next
    epoch together.
    """

    def of_epoch(self, epoch: int) -> Iterator[B]:
        """Yield all batches of one epoch.

        Raises:
            ConfigurationError: there is no batch.
        """
        with ExitStack() as stack:
            for session in sessions_here():
                if session.loop is not None and session.loop.epoch is not None:
                    stack.enter_context(session.loop.epoch())
            none = True
            for batch in drawn(self._batches, self._epochs.seed + epoch * self._workers + self._rank):
                none = False
                yield batch
            if none:
                raise ConfigurationError(
                    f"worker {self._rank} has no batch in epoch {epoch}; start only as many workers as have data, "
                    "and give shard a loader or a list, because a generator is empty after one epoch"
                )

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


def digest_of(batch: object) -> str:
    """Return 16 hexadecimal digits that are equal for batches with equal numbers and texts."""
    digest = hashlib.sha256()
    _add(digest, batch)
    return digest.hexdigest()[:16]


def _add(digest: Any, value: object) -> None:
    """Add numbers, texts, arrays and containers of them; of any other object only its type, which all workers share."""
    digest.update(type(value).__name__.encode())
    if isinstance(value, (bytes, bytearray)):
        digest.update(value)
    elif isinstance(value, (str, bool, int, float, complex)):
        digest.update(repr(value).encode())
    elif isinstance(value, Mapping):
        for key, one in value.items():
            _add(digest, key)
            _add(digest, one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            _add(digest, one)
    elif (is_tensor(value) and value.layout is sys.modules["torch"].strided) or (  # type: ignore[attr-defined]
        isinstance(value, np.ndarray) and not value.dtype.hasobject
    ):
        array = np.ascontiguousarray(to_host(value))
        digest.update(f"{array.shape} {array.dtype}".encode())
        digest.update(array.reshape(-1).view(np.uint8)[:MOST].data)


def tell_data(number: int, what: str, digest: str, certain: bool) -> None:
    """Send the supervisor a digest of the data that this worker is about to read; do nothing if there is no run.

    The supervisor compares digests of the same run step, of the loader with the same `number` among those in use, and
    of the same kind `what`. If they differ, the run ends if the difference is `certain` to be a mistake.
    """
    here = newest_session()
    if here is not None and here.worker is not None and not here.closed:
        note: Fields = {"of": f"{what} of loader {number}", "digest": digest, "certain": int(certain)}
        here.member.tell("data", None, {**note, "step": here.worker.run_step})
