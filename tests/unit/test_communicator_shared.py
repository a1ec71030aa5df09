"""Shared arrays of a communicator: sums in place, windows in memory, and what is refused."""

from __future__ import annotations

import sys
from threading import Event, Thread

import numpy as np
import pytest

from flockstep.communicator import shared_arrays
from flockstep.communicator.joining import join
from flockstep.errors import CompositionError, ConfigurationError, PeerLost, ProtocolError, TimedOut
from support.collectives import ring_sum
from support.communicators import PATIENCE, communicators

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux's")


@pytest.fixture(params=[2, 3])
def group(request):
    with communicators(request.param) as found:
        yield found


def rows(n, size):
    return [np.random.default_rng(rank).normal(size=size).astype(np.float32) for rank in range(n)]


@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (5000,)])
def test_a_sum_in_place_has_the_bits_of_a_ring(group, shape):
    n, size = len(group.ranks), int(np.prod(shape))

    def program(comm):
        array = comm.shared(shape)
        array.reshape(-1)[:] = rows(n, size)[comm.rank]
        assert comm.all_reduce(array, out=array) is array
        return array.tobytes(), array.shape

    assert group.run(program) == [(ring_sum(rows(n, size)).tobytes(), shape)] * n


def test_a_mean_and_arrays_one_after_the_other(group):
    def program(comm):
        one, two = comm.shared(3), comm.shared((2, 2), "float64")
        one[:], two[:] = comm.rank, 10
        comm.all_reduce(two, out=two, average=True)
        comm.all_reduce(one, out=one)
        return one.tolist(), two.tolist()

    n = len(group.ranks)
    assert group.run(program) == [([n * (n - 1) / 2] * 3, [[10.0, 10.0]] * 2)] * n


def test_a_sum_that_is_not_in_place_leaves_the_array(group):
    def program(comm):
        array = comm.shared(4)
        array[:] = 1
        return comm.all_reduce(array).tolist(), array.tolist()

    n = len(group.ranks)
    assert group.run(program) == [([n] * 4, [1] * 4)] * n


def test_windows_reach_the_others_memory_at_once(group):
    n = len(group.ranks)

    def program(comm):
        window = comm.window("w", comm.shared((2, 3)))
        right = (comm.rank + 1) % n
        window.put(right, np.full(2, comm.rank), offset=1)
        window.accumulate(right, np.ones(2), offset=4, scale=2.5)
        assert window.get(right, 1, 2).tolist() == [comm.rank] * 2
        window.fence()
        whole = window.get(comm.rank)
        half = window.get(comm.rank, codec="half")
        window.close()
        return whole.tolist(), half.tolist()

    left = [(rank - 1) % n for rank in range(n)]
    wanted = [[[0.0, who, who], [0.0, 2.5, 2.5]] for who in left]
    assert group.run(program) == [(array, array) for array in wanted]


def test_what_all_add_at_the_same_time_is_all_in_the_sum(group):
    n = len(group.ranks)

    def program(comm):
        window = comm.window("w", comm.shared(1000))

        def add():
            for _ in range(100):
                window.accumulate(0, np.ones(1000))

        threads = [Thread(target=add) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        window.fence()
        return window.get(0).tolist()

    assert group.run(program) == [[200.0 * n] * 1000] * n


def test_wrong_shapes_and_types_are_refused(group):
    def program(comm):
        for shape, dtype, rule in ((3, "int32", "int32"), (-1, "float32", "-1"), (1 << 40, "float32", str(1 << 40))):
            with pytest.raises(ConfigurationError, match=rule):
                comm.shared(shape, dtype)
        window = comm.window("w", comm.shared(3))
        with pytest.raises(ConfigurationError, match="choose a range inside"):
            window.put(0, np.zeros(4))
        with pytest.raises(ConfigurationError, match="a rank must be from"):
            window.get(9)

    group.run(program)


def test_ranks_that_want_different_shapes_hear_of_it(group):
    futures = group.start(lambda comm: comm.shared(3 + comm.rank))
    assert all(isinstance(future.exception(30), ConfigurationError) for future in futures)


def test_sums_of_different_arrays_at_the_same_time_are_noticed():
    with communicators(2) as pair:

        def program(comm):
            one = comm.shared(2000)
            comm._arrays[id(one)].flat = one[: 2000 - comm.rank]
            comm.all_reduce(one, out=one)

        assert {type(future.exception(30)) for future in pair.start(program)} == {ProtocolError}


def test_a_dead_rank_ends_the_wait():
    with communicators(2) as pair:
        arrays = pair.run(lambda comm: comm.shared(5))
        waiting = pair.start(lambda comm: comm.all_reduce(arrays[0], out=arrays[0]), 0)
        pair.lose(1, "worker 1 was killed")
        assert isinstance(waiting[0].exception(30), PeerLost)


def test_a_rank_that_is_closing_ends_the_wait():
    with communicators(2) as pair:
        arrays = pair.run(lambda comm: comm.shared(5))
        closing = pair.start(lambda comm: comm.close(), 1)
        waiting = pair.start(lambda comm: comm.all_reduce(arrays[0], out=arrays[0]), 0)
        error = waiting[0].exception(PATIENCE)
        assert isinstance(error, PeerLost)
        assert "worker 1 has left; worker 0 waited for that worker in an all-reduce" in str(error)
        assert not closing[0].done()


def test_who_leaves_right_after_its_last_sum_took_part_in_it(group):
    def program(comm):
        array = comm.shared(2000)
        array[:] = 1
        comm.all_reduce(array, out=array)
        comm.close()
        return float(array[0])

    n = len(group.ranks)
    assert group.run(program) == [n] * n


def test_a_sum_ends_after_its_timeout_and_leaves_the_array_useless():
    with communicators(2) as pair:
        arrays = pair.run(lambda comm: comm.shared(5))
        with pytest.raises(TimedOut, match=r"worker 0 waited 0\.05 s for the other workers in an all-reduce"):
            pair.ranks[0].all_reduce(arrays[0], out=arrays[0], timeout=0.05)
        with pytest.raises(
            TimedOut, match=r"all-reduce on this shared array failed.*create a new shared array on all ranks"
        ):
            pair.ranks[0].all_reduce(arrays[0], out=arrays[0])


def test_sums_and_means_of_the_same_array_are_told_apart():
    with communicators(2) as pair:

        def program(comm):
            array = comm.shared(2000)
            comm.all_reduce(array, out=array, average=comm.rank == 0)

        assert {type(future.exception(30)) for future in pair.start(program)} == {ProtocolError}


def test_two_windows_on_one_array_keep_each_other_out():
    with join() as comm:
        array = comm.shared(4)
        one, two = comm.window("one", array), comm.window("two", array)
        inside, done = Event(), Event()

        def add():
            inside.set()
            two.accumulate(0, np.ones(4))
            done.set()

        thread = Thread(target=add)
        with one.local() as held:
            thread.start()
            inside.wait(PATIENCE)
            assert not done.wait(0.05), "the other window's lock is another one"
            held += 1
        thread.join(PATIENCE)
        assert array.tolist() == [2.0] * 4


def test_inside_local_nothing_waits_for_itself():
    with join() as comm:
        window = comm.window("w", comm.shared(2))

        def program():
            with window.local():
                for call in (lambda: window.get(0), lambda: comm.close(), lambda: window.put(0, np.zeros(1))):
                    with pytest.raises(ConfigurationError, match=r"window that this rank holds with local\(\)"):
                        call()
            done.set()

        done = Event()
        Thread(target=program, daemon=True).start()
        assert done.wait(PATIENCE), "a call inside local() waits for it"


def test_a_dead_rank_s_window_is_not_reached():
    with communicators(2) as pair:
        windows = pair.run(lambda comm: comm.window("w", comm.shared(5)))
        pair.lose(1, "worker 1 was killed")
        with pytest.raises(PeerLost, match="worker 1 was killed"):
            pair.ranks[0].receive("x", 1, PATIENCE)
        for call in (lambda: windows[0].put(1, np.ones(1)), lambda: windows[0].get(1)):
            with pytest.raises(PeerLost, match="worker 1 was killed"):
                call()
        windows[0].put(0, np.ones(1))


def test_a_shared_array_is_no_larger_than_what_travels():
    with communicators(2, 4096) as pair:

        def program(comm):
            for shape in (1025, (1 << 32, 1 << 32)):
                with pytest.raises(ConfigurationError, match="at most 4096 bytes"):
                    comm.shared(shape)
            array = comm.shared(1024)
            comm.all_reduce(array, out=array)

        pair.run(program)


def test_where_one_rank_cannot_attach_all_hear_of_it(group, monkeypatch):
    attach, failing = shared_arrays.attached, [1]

    def attached(address, size):
        if failing and failing.pop():
            raise CompositionError("cannot attach to shared memory: the memory is on another host")
        return attach(address, size)

    monkeypatch.setattr("flockstep.communicator.communicator.attached", attached)

    def program(comm):
        with pytest.raises(CompositionError, match="cannot attach to shared memory"):
            comm.shared(10, timeout=PATIENCE)
        return comm.all_reduce(np.ones(2)).tolist()

    n = len(group.ranks)
    assert group.run(program) == [[n, n]] * n


def test_sums_in_memory_are_on_the_books_as_those_of_a_ring(group):
    def program(comm):
        array, before = comm.shared(10_001), totals(comm)
        comm.all_reduce(array, out=array)
        middle = totals(comm)
        comm.all_reduce(array)
        after = totals(comm)
        return tuple(np.subtract(middle, before)), tuple(np.subtract(after, middle))

    def totals(comm):
        comm.barrier()
        metrics = comm._engine.runner.metrics
        found = metrics.traffic.sent_bytes, metrics.traffic.received_bytes
        comm.barrier()
        return found

    for shared, ring in group.run(program):
        assert shared == ring
        assert shared[0] > 0


def test_alone_everything_works_too():
    with join() as comm:
        array = comm.shared((2, 2))
        array[:] = 3
        assert comm.all_reduce(array, out=array, average=True).tolist() == [[3.0, 3.0]] * 2
        window = comm.window("w", array)
        window.accumulate(0, np.ones(4))
        assert window.get(0).tolist() == [[4.0, 4.0]] * 2
