"""Sums in memory that processes share: the bits of a ring, waiting, mistakes, and what is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from flockstep import links
from flockstep.arrays.schema import slices
from flockstep.errors import CompositionError, ConfigurationError, FlockstepError, ProtocolError
from flockstep.links.shared_group import SharedGroup, needed, warm_up
from flockstep.links.shared_memory import SharedMemory

ROOM = 8 << 20
SIZES = (0, 1, 2, 3, 7, 1024, 1025, 8192, 8193, 33_333, 131_073, 262_144, 590_007)
"""Also on both sides of 32 KiB, up to which every process sums the whole array, and of the pieces of 512 KiB."""
FORK = multiprocessing.get_context("fork")


def given(rank, size, dtype, turn=0):
    return np.random.default_rng((rank, size, turn)).normal(size=size).astype(dtype)


def ring_sum(n, size, dtype, turn=0):
    """Chunk c is summed in the order c, c+1, …, c-1 of ranks."""
    rows, total = [given(rank, size, dtype, turn) for rank in range(n)], np.empty(size, dtype)
    for chunk, part in enumerate(slices(size, n)):
        total[part] = rows[chunk][part]
        for hop in range(1, n):
            total[part] += rows[(chunk + hop) % n][part]
    return total


def alone(room):
    """The group of a single worker."""
    return SharedGroup(SharedMemory.create(needed(1, room)), 0, 1, room)


def forget_numba():
    """Let this process import the modules of sums again, as if numba were missing."""
    sys.modules["numba"] = None
    for name in ("shared_sums", "shared_signals"):
        sys.modules.pop(f"flockstep.links.{name}")
        delattr(links, name)
    del sys.modules["flockstep.arrays.kernels.jit"]


def run(n, body, *arguments, room=ROOM, prepare=lambda: None):
    """What `body(group, *arguments)` returns in each of n processes; an exception as its text."""
    memory = SharedMemory.create(needed(n, room))
    queue = FORK.SimpleQueue()

    def member(rank):
        prepare()
        group = SharedGroup(SharedMemory.attach(memory.address), rank, n, room)
        try:
            queue.put((rank, body(group, *arguments)))
        except FlockstepError as error:
            queue.put((rank, f"{type(error).__name__}: {error}"))

    processes = [FORK.Process(target=member, args=(rank,)) for rank in range(n)]
    for process in processes:
        process.start()
    answers = dict(queue.get() for _ in processes)
    for process in processes:
        process.join()
    return [answers[rank] for rank in range(n)]


@pytest.fixture(autouse=True, scope="module")
def compiled():
    warm_up()


def sums(group, where, dtype, divisor):
    """Whether every sum has the expected bits."""
    right = []
    for turn in range(3):
        for size in SIZES:
            array = group.allocate(size, dtype) if where == "region" and turn == 0 else np.empty(size, dtype)
            array[:] = given(group.rank, size, dtype, turn)
            group.all_reduce(array, lambda: None, divisor)
            right.append(
                array.tobytes()
                == (ring_sum(group.workers, size, dtype, turn) / np.dtype(dtype).type(divisor)).tobytes()
            )
    return all(right)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("where", ["region", "anywhere"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_sum_has_the_bits_of_a_ring_on_every_process(n, where, dtype):
    assert run(n, sums, where, dtype, 1) == [True] * n


@pytest.mark.parametrize("where", ["region", "anywhere"])
@pytest.mark.parametrize("n", [2, 3])
def test_a_mean_is_the_sum_divided(n, where):
    assert run(n, sums, where, "float32", n) == [True] * n


@pytest.mark.parametrize("where", ["region", "anywhere"])
def test_sums_without_numba_have_the_same_bits(where):
    def plain(group, *arguments):
        from flockstep.links import shared_signals

        assert not hasattr(shared_signals.wait_for_all, "py_func")
        return sums(group, *arguments)

    assert run(3, plain, where, "float32", 3, prepare=forget_numba) == [True] * 3


def in_shares(group, shares):
    """What each process has at the end, when the sum of its own part was doubled between the two halves."""
    ended = []
    for turn, size in enumerate((0, 1, 7, 5000)):
        array = group.allocate(size, "float32")
        array[:] = given(group.rank, size, "float32", turn)
        group.reduce_scatter(array, shares, lambda: None)
        if group.rank < shares:
            array[slices(size, shares)[group.rank]] *= 2
        group.all_gather(array, shares, lambda: None)
        ended.append(array.tobytes())
    return ended


@pytest.mark.parametrize(("n", "shares"), [(2, 2), (2, 1), (3, 2), (4, 4)])
def test_a_sum_in_shares_may_be_changed_on_its_worker_before_all_get_it(n, shares):
    """Share i is summed in the order i, i+1, …, i-1, as with messages."""
    expected = []
    for turn, size in enumerate((0, 1, 7, 5000)):
        rows, total = [given(rank, size, "float32", turn) for rank in range(n)], np.empty(size, np.float32)
        for first, part in enumerate(slices(size, shares)):
            total[part] = sum((rows[(first + hop) % n][part] for hop in range(1, n)), start=rows[first][part])
        expected.append((total * 2).tobytes())
    assert run(n, in_shares, shares) == [expected] * n


def unequal_shares(group):
    array = group.allocate(5000 + group.rank, "float32")
    group.reduce_scatter(array, 2, lambda: None)


def test_a_sum_in_shares_of_different_sizes_is_noticed():
    assert all(str(answer).startswith("ProtocolError: worker") for answer in run(2, unequal_shares))


def unequal(group, inside):
    size = 5000 + group.rank
    array = group.allocate(size, "float32") if inside else np.zeros(size, "float32")
    group.all_reduce(array, lambda: None)


@pytest.mark.parametrize("inside", [True, False])
def test_arrays_of_different_sizes_are_noticed(inside):
    answers = run(2, unequal, inside)
    assert all(answer.startswith("ProtocolError: worker") for answer in answers), answers


def of_another_dtype(group):
    group.all_reduce(np.ones(100, "float32" if group.rank else "float64"), lambda: None)


def averaged_by_one(group, inside):
    array = group.allocate(5000, "float32") if inside else np.zeros(5000, "float32")
    group.all_reduce(array, lambda: None, 1 + group.rank)


def test_arrays_of_different_dtypes_are_noticed():
    assert all(answer.startswith("ProtocolError: worker") for answer in run(2, of_another_dtype))


@pytest.mark.parametrize("inside", [True, False])
def test_a_sum_and_a_mean_are_told_apart(inside):
    assert all(str(answer).startswith("ProtocolError: worker") for answer in run(2, averaged_by_one, inside))


def one_inside(group):
    array = group.allocate(5000, "float32") if group.rank else np.zeros(5000, "float32")
    group.all_reduce(array, lambda: None)


def test_an_array_in_the_region_and_one_elsewhere_are_noticed():
    assert any(str(answer).startswith("ProtocolError") for answer in run(2, one_inside))


def late(group, inside):
    """The first one comes late; the other one hears that it is called meanwhile, and what it costs to wait."""
    calls = []
    array = group.allocate(300_000, "float32") if inside else np.zeros(300_000, "float32")
    array[:] = 1
    if group.rank == 0:
        while group._memory.array(np.int32, 1, 1 << 6)[0] < 5:  # until the other one has been called back five times
            pass
    start, busy = time.perf_counter(), time.process_time()

    def meanwhile():
        calls.append(1)
        group._memory.array(np.int32, 1, 1 << 6)[0] += 1

    group.all_reduce(array, meanwhile)
    wall, cpu = time.perf_counter() - start, time.process_time() - busy
    return len(calls), bool((array == 2).all()), cpu / wall, group.waited / wall


@pytest.mark.parametrize("inside", [True, False])
def test_who_waits_long_is_called_back_sleeps_and_goes_on(inside):
    first, second = run(2, late, inside)
    assert first[1]
    assert second[1]
    assert second[0] >= 5
    assert second[2] < 0.5, "waiting keeps a core busy"
    assert second[3] > 0.5, "the wait is not on the books"


class Gone(Exception):
    pass


def abandoned(group):
    if group.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)

    def meanwhile():
        raise Gone("worker 0 was lost")

    group.all_reduce(np.zeros(10, np.float32), meanwhile)


def test_a_wait_for_a_killed_process_ends_when_the_callback_raises():
    memory = SharedMemory.create(needed(2, ROOM))
    queue = FORK.SimpleQueue()

    def member(rank):
        try:
            abandoned(SharedGroup(SharedMemory.attach(memory.address), rank, 2, ROOM))
        except Gone as error:
            queue.put(str(error))

    processes = [FORK.Process(target=member, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    assert queue.get() == "worker 0 was lost"
    for process in processes:
        process.join()
    assert processes[0].exitcode == -signal.SIGKILL


def test_the_segment_has_no_name_to_leave_behind():
    memory = SharedMemory.create(needed(2, 0))
    assert memory.address.split(":")[1].startswith("/proc/")
    assert "memfd" in str(Path(memory.address.split(":")[1]).readlink())


def test_a_segment_that_is_too_small_is_refused():
    memory = SharedMemory.create(needed(2, 4096))
    with pytest.raises(ProtocolError, match="is too small for 2 workers with 8192 bytes each"):
        SharedGroup(memory, 0, 2, 8192)
    with pytest.raises(CompositionError, match=f"the segment has {memory.size} bytes instead of {memory.size + 1}"):
        SharedMemory.attach(memory.address, memory.size + 1)


def test_nobody_can_be_made_to_write_into_another_file(tmp_path):
    memory, file = SharedMemory.create(4096), tmp_path / "mine"
    file.write_bytes(bytes(4096))
    host = memory.address.partition(":")[0]
    with file.open("r+b") as opened:
        for path in (file, f"/proc/{os.getpid()}/fd/{opened.fileno()}", f"/proc/self/fd/../../..{file}"):
            with pytest.raises(CompositionError, match="is not a shared-memory segment of flockstep"):
                SharedMemory.attach(f"{host}:{path}")


def test_more_than_there_can_be_is_refused_and_leaves_nothing_open():
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(
        ConfigurationError, match=r"cannot allocate .* bytes of shared memory: .*; use a smaller model or array"
    ):
        SharedMemory.create(1 << 62)
    assert set(Path("/proc/self/fd").iterdir()) <= before


def test_a_full_region_is_refused():
    group = alone(4096)
    group.allocate(1024, "float32")
    with pytest.raises(ConfigurationError, match="no room for 4096 more"):
        group.allocate(1, "float32")


def test_what_cannot_be_added_up_is_said_beforehand():
    group = alone(4096)
    assert group.can(np.zeros(3, np.float32))
    for array in (np.zeros(3, np.float16), np.zeros((2, 2), np.float32), np.zeros(4, np.float32)[::2]):
        assert not group.can(array)


def wrapping(group):
    group._turn = 2**31 - 3
    group._counters[group.rank * 32] = 2**31 - 3
    array = np.ones(3, np.float32)
    for _ in range(6):
        group.all_reduce(array, lambda: None)
    return array.tolist() == [64] * 3


def test_counters_may_wrap_around():
    assert run(2, wrapping) == [True, True]


def by_slices(group):
    """What each process has after it has doubled its part of the mean; and whether its own array has changed."""
    ended, place = [], group.allocate(5000, "float32")
    for turn, size in enumerate((1, 7, 5000, 5000)):
        array, into = group.allocate(size, "float32"), np.zeros(size, np.float32)
        array[:] = given(group.rank, size, "float32", turn)
        part = slices(size, group.workers)[group.rank]
        mean = place[: part.stop - part.start]
        group.mean_of_part(array, mean, lambda: None)
        mean *= 2
        into[part] = mean
        group.exchange_parts(place, into, lambda: None)
        ended.append((into.tobytes(), array.tobytes() == given(group.rank, size, "float32", turn).tobytes()))
    return ended


@pytest.mark.parametrize("n", [2, 3, 4])
def test_parts_of_a_mean_are_added_in_the_order_of_processes(n):
    expected = []
    for turn, size in enumerate((1, 7, 5000, 5000)):
        rows = [given(rank, size, "float32", turn) for rank in range(n)]
        expected.append((((sum(rows[1:], start=rows[0]) / np.float32(n)) * 2).tobytes(), True))
    assert run(n, by_slices) == [expected] * n


def test_an_array_that_is_taken_leaves_no_memory_behind(monkeypatch):
    """In pieces, so that there are never two copies of the gradients, and other arrays stay."""
    monkeypatch.setattr("flockstep.links.shared_group.RETURNED", 1 << 14)
    group = alone(ROOM)
    before, array, after = (group.allocate(size, "float32") for size in (1000, 100_003, 1000))
    before[:], after[:] = 1, 2
    array[:] = np.arange(100_003)
    held = os.fstat(group._memory._descriptor).st_blocks
    own = group.taken(array)
    assert np.array_equal(own, np.arange(100_003))
    assert not group.holds(own)
    assert 512 * (held - os.fstat(group._memory._descriptor).st_blocks) >= array.nbytes
    assert (before == 1).all()
    assert (after == 2).all()
