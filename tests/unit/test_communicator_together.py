"""What all ranks of a communicator do together: windows and collectives, against sums written down by hand."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flockstep.arrays.schema import slices
from flockstep.communicator.communicator import Communicator
from flockstep.communicator.encoded import Reply, WindowOperation
from flockstep.communicator.window import Window
from flockstep.errors import ConfigurationError, PeerLost, ProtocolError, TimedOut
from flockstep.messages import Message
from flockstep.topologies.base import Topology
from support.communicators import PATIENCE, Group, communicators
from support.processes import wait_until

N = 3
SHAPES = [(), (0,), (1,), (10,), (4, 5), (2, 0, 3)]


@pytest.fixture(scope="module")
def three() -> Iterator[Group]:
    with communicators(N) as group:
        yield group


def part(rank: int, shape: tuple[int, ...] = (4, 5), dtype: Any = np.float64) -> Any:
    return np.random.default_rng(rank).integers(-8, 9, shape).astype(dtype)


def total(shape: tuple[int, ...] = (4, 5), dtype: Any = np.float64) -> Any:
    return np.sum([part(rank, shape, dtype).astype(np.float64) for rank in range(N)], axis=0).astype(dtype)


def equal(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(np.all(a == b))


@pytest.mark.parametrize("collective", ["ring", "recursive_doubling"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_reduce_gives_everyone_the_sum(three: Group, shape: Any, dtype: Any, collective: str) -> None:
    sums = three.run(lambda comm: comm.all_reduce(part(comm.rank, shape, dtype), collective))
    assert all(equal(one, total(shape, dtype)) for one in sums)


def test_all_reduce_leaves_its_array_alone_unless_it_is_to_hold_the_sum(three: Group) -> None:
    def program(comm: Communicator) -> None:
        array, other = part(comm.rank), np.zeros((5, 4)).T
        assert comm.all_reduce(array, out=other) is other
        assert equal(array, part(comm.rank))
        assert equal(other, total())
        assert comm.all_reduce(array, out=array, average=True) is array
        assert np.allclose(array, total() / N)
        half = part(comm.rank)
        assert comm.all_reduce(half, codec="half", out=half) is half
        assert equal(half, total())

    three.run(program)


def test_the_other_collectives_give_what_they_say(three: Group) -> None:
    def program(comm: Communicator) -> None:
        array, rank = part(comm.rank), comm.rank
        for codec in (None, "half"):
            share = slices(20, N)[rank]
            assert equal(comm.reduce_scatter(array, codec=codec), total().reshape(-1)[share])
            reduced = comm.reduce(array, to=1, codec=codec)
            assert equal(reduced, total()) if rank == 1 else reduced is None
            assert equal(comm.broadcast(array if rank == 2 else None, source=2, codec=codec), part(2))
            gathered = comm.all_gather(part(rank, (rank + 1, 2)), codec=codec)
            assert all(equal(one, part(r, (r + 1, 2))) for r, one in enumerate(gathered))
            for topology in ("ring", "star", "one_peer_exponential"):
                for weights in Topology.parse(topology).schedule(N):
                    got = comm.neighbor_average(array, topology, codec=codec, name=f"{topology} {codec}")
                    assert np.allclose(got, np.tensordot(weights, [part(r) for r in range(N)], 1)[rank])
        comm.barrier()

    three.run(program)


def test_residual_feedback_sends_later_what_a_codec_left_out(three: Group) -> None:
    def program(comm: Communicator) -> Any:
        array = np.full(5, 1 + 2.0**-13)
        sums = [comm.all_reduce(array, codec="half", feedback="residual", name="kept") for _ in range(16)]
        plain = [comm.all_reduce(array, codec="half", name="dropped") for _ in range(16)]
        return np.sum(sums, axis=0), np.sum(plain, axis=0)

    true = 16 * N * (1 + 2.0**-13)
    for kept, dropped in three.run(program):
        assert np.abs(kept - true).max() < np.abs(dropped - true).min() / 2


def test_two_named_collectives_go_on_at_once_in_any_order(three: Group) -> None:
    def program(comm: Communicator) -> None:
        def many(name: str, scale: int, out: list[Any]) -> None:
            out.extend(comm.all_reduce(part(comm.rank) * scale, name=name) for _ in range(20))

        results: dict[str, list[Any]] = {"a": [], "b": []}
        jobs = [("a", 1), ("b", 3)]
        threads = [
            threading.Thread(target=many, args=(*job, results[job[0]])) for job in jobs[:: 1 - 2 * comm.rank % 2]
        ]
        for one in threads:
            one.start()
        for one in threads:
            one.join(PATIENCE)
        assert all(equal(one, total()) for one in results["a"])
        assert all(equal(one, total() * 3) for one in results["b"])
        assert len(results["a"]) == len(results["b"]) == 20

    three.run(program)


@pytest.mark.parametrize(
    "other",
    [
        lambda comm: comm.all_reduce(np.ones(4), name="mixed", timeout=PATIENCE),
        lambda comm: comm.all_reduce(np.ones(3, np.float32), name="mixed", timeout=PATIENCE),
        lambda comm: comm.all_reduce(np.ones(3), "recursive_doubling", name="mixed", timeout=PATIENCE),
        lambda comm: comm.all_reduce(np.ones(3), codec="half", name="mixed", timeout=PATIENCE),
        lambda comm: comm.broadcast(np.ones(3), 1, name="mixed", timeout=PATIENCE),
        lambda comm: comm.barrier("mixed", timeout=PATIENCE),
    ],
)
def test_ranks_that_call_different_things_hear_of_it(three: Group, other: Any) -> None:
    def program(comm: Communicator) -> Any:
        return other(comm) if comm.rank == 1 else comm.all_reduce(np.ones(3), name="mixed", timeout=PATIENCE)

    errors = [future.exception(PATIENCE) for future in three.start(program)]
    assert any(isinstance(error, ConfigurationError) for error in errors)
    assert "call the same collectives in the same order on every worker, or give every call a name" in str(errors)
    assert all(error is None or "calls" in str(error) for error in errors)
    assert all(equal(one, total()) for one in three.run(lambda comm: comm.all_reduce(part(comm.rank), name="mixed")))


def test_who_comes_late_is_told_that_the_others_gave_up(three: Group) -> None:
    with pytest.raises(TimedOut, match=r"worker 0 waited 0\.01 s"):
        three.ranks[0].all_reduce(np.ones(2), name="late", timeout=0.01)
    with pytest.raises(TimedOut, match="worker 0 waited"):
        three.ranks[1].all_reduce(np.ones(2), name="late", timeout=PATIENCE)
    with pytest.raises(TimedOut, match="worker 0 waited"):
        three.ranks[2].all_reduce(np.ones(2), name="late", timeout=PATIENCE)


def test_what_all_ranks_accumulate_at_once_is_all_in_the_sum(three: Group) -> None:
    def program(comm: Communicator) -> Any:
        window = comm.window("sum", np.zeros((4, 5), np.float32))
        threads = [threading.Thread(target=add, args=(window, comm.rank)) for _ in range(2)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(PATIENCE)
        window.fence()
        result = window.array.copy(), window.get((comm.rank + 1) % N)
        window.close()
        return result

    def add(window: Any, rank: int) -> None:
        for _ in range(50):
            for to in range(N):
                window.accumulate(to, np.full((4, 5), rank + 1))
                window.accumulate(to, np.ones(3), offset=17, scale=-2.0, codec="half")

    expected = np.full(20, 2 * 50 * 6.0)
    expected[17:] -= 2 * 50 * N * 2.0
    for own, got in three.run(program):
        assert own.reshape(-1).tolist() == expected.tolist()
        assert equal(got, own)


@pytest.mark.parametrize("codec", [None, "half"])
def test_after_a_fence_what_anyone_put_is_everywhere(three: Group, codec: str | None) -> None:
    def program(comm: Communicator) -> None:
        window = comm.window("turns", np.zeros((N, 2000), np.float32))
        rank = comm.rank
        for turn in range(10):
            for to in range(N):
                window.put(to, np.full(2000, 100.0 * turn + rank), offset=2000 * rank, codec=codec)
            window.fence()
            for to in range(N):
                got = window.get(to, codec=codec, timeout=PATIENCE)
                assert got[:, 0].tolist() == got[:, -1].tolist() == [100.0 * turn + r for r in range(N)]
            assert window.get(0, 1999, 2).tolist() == [100.0 * turn, 100.0 * turn + 1]
            window.fence()
        window.close()

    three.run(program)


def test_a_window_makes_progress_while_its_owner_computes(three: Group) -> None:
    reached = threading.Event()

    def program(comm: Communicator) -> None:
        window = comm.window("busy", np.zeros(3))
        if comm.rank == 0:
            while not reached.is_set():  # never calls the comm
                np.sqrt(np.arange(1000.0)).sum()
            assert window.array.tolist() == [5, 5, 5]
        if comm.rank == 1:
            window.put(0, np.full(3, 5))
            assert window.get(0, timeout=PATIENCE).tolist() == [5, 5, 5]
            reached.set()
        window.close()

    three.run(program)


def test_nothing_happens_to_a_window_while_its_owner_holds_it(three: Group) -> None:
    held, asked = threading.Event(), threading.Event()

    def program(comm: Communicator) -> None:
        window = comm.window("held", np.zeros(3))
        if comm.rank == 0:
            with window.local() as array:
                held.set()
                assert asked.wait(PATIENCE)
                assert array.tolist() == [0, 0, 0]
                array += 1
                with pytest.raises(ConfigurationError, match=r"this rank holds with local"):
                    comm.barrier()
        if comm.rank == 1:
            assert held.wait(PATIENCE)
            window.accumulate(0, np.ones(3))
            asked.set()
        window.fence()
        if comm.rank == 0:
            assert window.array.tolist() == [2, 2, 2]
        window.close()

    three.run(program)


def test_windows_that_differ_are_refused_and_their_name_is_free_again(three: Group) -> None:
    def differing(comm: Communicator) -> Any:
        return comm.window("odd", np.zeros(3 + (comm.rank == 2)), timeout=PATIENCE)

    errors = [future.exception(PATIENCE) for future in three.start(differing)]
    assert all(isinstance(error, ConfigurationError) for error in errors)
    assert "window 'odd' of float64 (4,)" in str(errors)

    def program(comm: Communicator) -> None:
        window = comm.window("odd", np.zeros(3))
        with pytest.raises(ConfigurationError, match="a window named 'odd' is open already"):
            comm.window("odd", np.zeros(3))
        for call in (
            lambda: window.put(0, np.ones(4)),
            lambda: window.accumulate(1, np.ones(2), offset=2),
            lambda: window.get(1, offset=-1),
            lambda: window.get(1, size=4),
        ):
            with pytest.raises(ConfigurationError, match=r"window 'odd' has 3 elements, got .*; choose a range inside"):
                call()
        window.close()

    three.run(program)


@pytest.mark.parametrize(
    "note",
    [
        WindowOperation(shape=(3,), what="put", offset=2, size=3),
        WindowOperation(shape=(2,), what="put", size=3),
        WindowOperation(shape=(0, 10**14, 10**14), what="put", size=3),
        WindowOperation(shape=(3,), codec="quarter", dtype="float32", what="put", size=3),
        WindowOperation(shape=(3,), what="add", size=2),
    ],
)
def test_what_a_receiver_cannot_use_is_said_at_the_next_fence(three: Group, note: WindowOperation) -> None:
    def program(comm: Communicator) -> None:
        window = comm.window("strict", np.zeros(3))
        if comm.rank == 1:
            comm.post(0, window.tag, np.ones(3), note)
            with pytest.raises(ProtocolError, match=r"worker 0 failed in the window operation '(put|add)'"):
                window.fence()
        else:
            window.fence()
        assert not window.array.any()
        window.close()

    three.run(program)


@pytest.mark.parametrize("answer", [np.ones(2), np.ones(3, np.float32), np.ones(3, np.int64)])
def test_an_answer_that_was_not_asked_for_is_refused(
    three: Group, answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = Window(three.ranks[0], "w", np.zeros(3))
    note = Reply(shape=answer.shape)
    monkeypatch.setattr(three.ranks[0], "asked", lambda *given: Message(1, window.tag, answer, note))
    with pytest.raises(
        ProtocolError, match=r"worker 1 answered with .* but 3 elements of float64 of window 'w' were requested"
    ):
        window.get(1)


def test_a_dead_rank_ends_a_fence_and_its_window() -> None:
    with communicators(N) as group:
        windows = group.run(lambda comm: comm.window("w", np.zeros(3)))
        fences = [group._pool.submit(windows[rank].fence) for rank in (0, 1)]
        group.lose(2, "worker 2 was killed by SIGKILL")
        for fence in fences:
            error = fence.exception(PATIENCE)
            assert isinstance(error, PeerLost)
            assert "worker 2 was killed by SIGKILL" in str(error)
        # Rank 1 may have called the fence off before rank 0 hears of the death itself.
        wait_until(lambda: group.nodes[0].gone(2), PATIENCE, "rank 0 knows of the death")
        for call in (lambda: windows[0].put(2, np.ones(3)), lambda: windows[0].get(2)):
            with pytest.raises(PeerLost, match="worker 2 was killed by SIGKILL"):
                call()
        windows[0].accumulate(1, np.ones(3))
        assert windows[0].get(1, timeout=PATIENCE).tolist() == [1, 1, 1]
