"""The communicator, rank by rank in threads: what arrives, in which order, and what is said when it cannot."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flockstep
from flockstep.communicator.communicator import Communicator
from flockstep.communicator.encoded import NOTES, Encoded, add_unpacked, unpacked
from flockstep.errors import ConfigurationError, Interrupted, PeerLost, ProtocolError, RunError, TimedOut
from flockstep.links.bus import Backlog
from flockstep.links.wire import SenderIdentity, decode, encode
from flockstep.messages import Message
from support.communicators import PATIENCE, Group, communicators

MOST = 1 << 20
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int32, np.uint8, np.bool_]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (2, 3, 4)]


@pytest.fixture(scope="module")
def three() -> Iterator[Group]:
    with communicators(3, MOST) as group:
        yield group


def sample(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Any:
    return (np.random.default_rng(seed).standard_normal(shape) * 10).astype(dtype)


def same(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda kind: np.dtype(kind).name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_array_arrives_as_it_was_sent(three: Group, shape: tuple[int, ...], dtype: Any) -> None:
    array = sample(shape, dtype)
    three.ranks[0].send(2, "x", array)
    got = three.ranks[2].receive("x", 0, PATIENCE)
    assert same(got, array)
    assert got.flags.writeable


def test_an_array_may_lie_in_memory_in_any_way_and_change_once_it_was_sent(three: Group) -> None:
    grid = sample((6, 8), np.float32)
    for view in (grid[::2, 1::3], grid.T, grid[::-1], np.broadcast_to(grid[0], (3, 8))):
        before = view.copy()
        three.ranks[1].send(0, "view", view)
        three.ranks[1].send(0, "coded", view, codec="half")
        grid += 1
        assert same(three.ranks[0].receive("view", 1, PATIENCE), before)
        assert np.allclose(three.ranks[0].receive("coded", 1, PATIENCE), before, rtol=1e-3)
    large = np.zeros(200_000, np.float32)
    three.ranks[1].send(0, "large", large)
    large[:] = 1
    assert not three.ranks[0].receive("large", 1, PATIENCE).any()


def test_arrays_of_one_name_arrive_in_order_and_others_do_not_matter(three: Group) -> None:
    for number in range(50):
        three.ranks[0].send(1, "a/b", np.array(number))
        three.ranks[0].send(1, "other", np.array(-number))
    assert [int(three.ranks[1].receive("a/b", timeout=PATIENCE)) for _ in range(50)] == list(range(50))
    assert three.ranks[1].receive_from("other", timeout=PATIENCE)[0] == 0


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_codec_s_array_arrives_as_its_decoding(three: Group, shape: tuple[int, ...], dtype: Any) -> None:
    array = sample(shape, dtype)
    three.ranks[0].send(1, "half", array, codec="half")
    assert same(three.ranks[1].receive("half", 0, PATIENCE), array.astype(np.float16).astype(dtype))


def test_a_handler_answers_on_a_thread_of_its_own_and_its_errors_travel_back(three: Group) -> None:
    where = []

    def twice(source: int, array: Any) -> Any:
        where.append(threading.current_thread().name)
        if array is None:
            raise KeyError("nothing to double")
        return array * 2 + source

    three.ranks[2].serve("twice", twice)
    three.ranks[2].serve("quiet", lambda source, array: None)
    array = sample((2, 3), np.float64)
    assert same(three.ranks[1].request(2, "twice", array, timeout=PATIENCE), array * 2 + 1)
    assert same(three.ranks[2].request(2, "twice", array, timeout=PATIENCE), array * 2 + 2)
    half = three.ranks[0].request(2, "twice", array, codec="half", timeout=PATIENCE)
    assert np.allclose(half, array * 2, rtol=1e-3)
    assert three.ranks[0].request(2, "quiet", timeout=PATIENCE) is None
    with pytest.raises(RunError, match="worker 2 could not answer 'twice': KeyError: 'nothing to double'"):
        three.ranks[0].request(2, "twice", timeout=PATIENCE)
    assert set(where) == {"flockstep-serve-twice"}
    with pytest.raises(ConfigurationError, match="already serves requests named 'twice'; choose another name"):
        three.ranks[2].serve("twice", twice)


def test_requests_that_nothing_serves_wait_for_an_answer(three: Group) -> None:
    asked = three.start(lambda comm: comm.request(1, "later", np.arange(3), timeout=PATIENCE), 0, 2)
    sources = []
    for _ in range(2):
        request = three.ranks[1].next_request("later", timeout=PATIENCE)
        sources.append(request.source)
        three.ranks[1].reply(request, request.array + request.source)
    assert sorted(sources) == [0, 2]
    assert [future.result(PATIENCE).tolist() for future in asked] == [[0, 1, 2], [2, 3, 4]]
    early = three.start(lambda comm: comm.request(1, "early", np.ones(1), timeout=PATIENCE), 0)
    three.ranks[1].serve("early", lambda source, array: array + 1)
    assert early[0].result(PATIENCE).tolist() == [2]


def test_four_threads_send_at_once(three: Group) -> None:
    def send(comm: Communicator, thread: int) -> None:
        for number in range(100):
            comm.send(1, f"thread {thread}", np.full(thread + 1, number))

    threads = [threading.Thread(target=send, args=(three.ranks[0], number)) for number in range(4)]
    for one in threads:
        one.start()
    for thread in range(4):
        got = [three.ranks[1].receive(f"thread {thread}", 0, PATIENCE) for _ in range(100)]
        assert [array.tolist() for array in got] == [[number] * (thread + 1) for number in range(100)]


def test_much_more_than_may_be_under_way_arrives(three: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flockstep.communicator.engine.AHEAD", 1 << 20)
    array = np.arange(100_000, dtype=np.float64)
    sent = three.start(lambda comm: [comm.send(1, "much", array + k) for k in range(30)], 0)
    for k in range(30):
        assert three.ranks[1].receive("much", 0, PATIENCE)[0] == k
    sent[0].result(PATIENCE)


def test_a_wait_ends_after_its_timeout_and_takes_nothing_away(three: Group) -> None:
    with pytest.raises(TimedOut, match=r"worker 0 waited 0.01 s for 'never'; other ranks may be late or stopped"):
        three.ranks[0].receive("never", timeout=0.01)
    with pytest.raises(TimedOut, match=r"worker 0 waited 0.01 s for .*'nobody serves this'"):
        three.ranks[0].request(1, "nobody serves this", timeout=0.01)
    with pytest.raises(TimedOut, match="barrier"):
        three.ranks[0].barrier("alone", timeout=0.01)
    three.ranks[1].send(0, "never", np.ones(2))
    assert three.ranks[0].receive("never", timeout=PATIENCE).tolist() == [1, 1]


def test_misuse_is_named(three: Group) -> None:
    comm = three.ranks[0]
    wrong: list[tuple[Any, str]] = [
        (lambda: comm.send(3, "x", np.ones(1)), r"a rank must be from 0 to 2, got 3"),
        (lambda: comm.receive("x", -1), r"a rank must be from 0 to 2, got -1"),
        (lambda: comm.send(1, "x", np.array([None])), "an array must be one of .*, got object; convert it"),
        (lambda: comm.send(1, "x", np.zeros(MOST)), "at most 1048576 bytes, got 8388608; send it in parts"),
        (lambda: comm.send(1, "x", np.ones(1), codec="haff"), "did you mean 'half'"),
        (lambda: comm.send(1, "x", np.arange(3), codec="half"), "codec half encodes only float16, .*, got int64; send"),
        (lambda: comm.send(1, "n" * 300, np.ones(1)), "a name has at most 200 characters, got 300"),
        (lambda: comm.all_reduce(np.arange(3), average=True), "a mean needs floating-point numbers, got int64"),
        (lambda: comm.all_reduce(np.ones(3), collective="rnig"), "did you mean 'ring'"),
        (lambda: comm.window("w", np.ones((4, 4))[::2, ::2]), "contiguous and writable numpy array; pass a copy"),
    ]
    for call, text in wrong:
        with pytest.raises(ConfigurationError, match=text):
            call()


def arrived(note: Any, data: Any, tag: str = "send:x/") -> Message:
    """What a receiver makes of a message with whatever a sender put into its note."""
    sender, receiver = (SenderIdentity("run", rank, "schema", MOST, notes=NOTES) for rank in (1, 0))
    return decode(encode(Message(1, tag, data, note, number=1), sender), data.data, 1, receiver)


HALF = {"shape": [4], "codec": "half", "dtype": "float32"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"codec": "__import__('os')"}, "announced a codec that cannot be used here"),
        ({"codec": "quarter"}, "announced a codec that cannot be used here: no codec is called 'quarter'"),
        ({"codec": "half" + " " * 600}, "not of type Encoded: Expected `str` of length <= 500"),
        ({"dtype": "object"}, "worker 1 announced an encoded array of 'object'"),
        ({"shape": [4000, 4000]}, "announced an array of 64000000 bytes; at most 1048576 are allowed"),
        ({"shape": [5]}, "half needs 10 bytes for 5 elements, got 8"),
        ({"shape": [-4]}, "not of type Encoded: Expected `int` >= 0"),
        ({"shape": [1] * 40}, "not of type Encoded: Expected `array` of length <= 32"),
        ({"shape": 4.0}, "not of type Encoded: Expected `array`, got `float`"),
        ({"shape": [0, 10**14, 10**14]}, "announced the impossible shape"),
        ({"shape": [0, 4000, 4000]}, "announced an array of 64000000 bytes; at most 1048576 are allowed"),
        ({"at": -1}, "not of type Encoded: Expected `int` >= 0"),
        ({"more": 1}, "not of type Encoded: Object contains unknown field `more`"),
    ],
)
def test_what_a_note_says_is_checked(changes: dict[str, Any], text: str) -> None:
    data = np.ones(4, np.float16).view(np.uint8)
    assert unpacked(arrived(HALF, data), MOST).tolist() == [1, 1, 1, 1]
    with pytest.raises(ProtocolError, match=text):
        unpacked(arrived({**HALF, **changes}, data), MOST)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "shape": st.lists(st.sampled_from([0, 1, 2, 4, 9999999999]) | st.integers(), max_size=4) | st.text(),
            "dtype": st.sampled_from(["float32", "float64", "bfloat16", "int64"]) | st.text(max_size=6),
            "codec": st.sampled_from(["half", "identity", "half()", "half(1)"]) | st.text(max_size=12),
            "at": st.integers(-(1 << 60), 1 << 60) | st.floats() | st.text(max_size=3),
        },
    ),
    st.binary(max_size=40),
)
def test_whatever_arrives_is_an_array_or_a_protocol_error(note: dict[str, Any], data: bytes) -> None:
    with np.errstate(all="ignore"), contextlib.suppress(ProtocolError, OverflowError):
        assert unpacked(arrived(note, np.frombuffer(data, np.uint8)), MOST).nbytes <= MOST


def test_plain_arrays_are_checked_too() -> None:
    plain = np.ones(4, np.float32)
    assert unpacked(arrived({"shape": [2, 2]}, plain), MOST).shape == (2, 2)
    with pytest.raises(ProtocolError, match=r"worker 1 sent 4 elements for an array of shape \(3,\)"):
        unpacked(arrived({"shape": [3]}, plain), MOST)
    with pytest.raises(ProtocolError, match="worker 1 sent 4 × float32 for 4 × float64"):
        add_unpacked(arrived({"shape": [4]}, plain), np.zeros(4), 1.0, MOST)
    for data in (np.ones(4), np.ones(4, np.int64)):
        with pytest.raises(ProtocolError, match=f"worker 1 sent 4 × {data.dtype} for 4 × float32"):
            add_unpacked(arrived({"shape": [4], "dtype": "float32"}, data), np.zeros(4, np.float32), 1.0, MOST)
    with pytest.raises(ProtocolError, match="announced the impossible shape"):
        unpacked(arrived({"shape": [0, 10**14, 10**14]}, np.empty(0)), MOST)
    with pytest.raises(ProtocolError, match="without an array"):
        unpacked(Message(1, "x", None, Encoded()), MOST)


@pytest.mark.parametrize(
    "changes", [{"offset": -1}, {"offset": "0"}, {"scale": "1"}, {"what": "drop"}, {"size": 1 << 50}, {"size": None}]
)
def test_what_a_window_is_asked_is_checked(changes: dict[str, Any]) -> None:
    with pytest.raises(
        ProtocolError, match="worker 1 sent 'window:w/' with a note that is not of type WindowOperation"
    ):
        arrived({"what": "put", "shape": [4], **changes}, np.ones(4), "window:w/")


def test_a_lost_rank_is_named_to_all_who_need_it() -> None:
    with communicators(3) as group:
        group.ranks[2].send(0, "before", np.ones(1))
        waiting = group.start(lambda comm: comm.receive("grad", 2), 0, 1)
        summing = group.start(lambda comm: comm.all_reduce(np.ones(3), name="sum"), 0, 1)
        group.lose(2, "worker 2 was killed by SIGKILL")
        for rank, future in enumerate(waiting):
            error = future.exception(PATIENCE)
            assert isinstance(error, PeerLost)
            assert str(error) == f"worker 2 was killed by SIGKILL; worker {rank} waited for 'grad'"
        assert all(isinstance(future.exception(PATIENCE), PeerLost) for future in summing)
        with pytest.raises(
            PeerLost, match="worker 2 was killed by SIGKILL, so worker 0 cannot send worker 2 a message"
        ):
            group.ranks[0].send(2, "x", np.ones(1))
        with pytest.raises(PeerLost, match="worker 2 was killed"):
            group.ranks[0].request(2, "x")
        assert group.ranks[0].receive("before", 2, PATIENCE).tolist() == [1], "what came before is not lost"
        group.ranks[0].send(1, "y", np.ones(1))
        assert group.ranks[1].receive("y", 0, PATIENCE).tolist() == [1], "the other workers continue"


def test_who_has_left_is_missed_but_serves_until_all_have() -> None:
    with communicators(2) as group:
        group.ranks[1].serve("name", lambda source, array: np.array(7))
        closing = group.start(lambda comm: comm.close(), 1)
        with pytest.raises(PeerLost, match="worker 1 has left; worker 0 waited for 'x'"):
            group.ranks[0].receive("x", 1, PATIENCE)
        with pytest.raises(PeerLost, match="all other workers have left the run while worker 0 waited for 'x'"):
            group.ranks[0].receive("x")
        with pytest.raises(PeerLost, match="worker 1 has left"):
            group.ranks[0].send(1, "x", np.ones(1))
        assert group.ranks[0].request(1, "name", timeout=PATIENCE) == 7
        with pytest.raises(RunError, match="worker 1 has left without answering"):
            group.ranks[0].request(1, "nobody serves this", timeout=PATIENCE)
        assert not closing[0].done()
        group.ranks[0].close()
        closing[0].result(PATIENCE)
        for comm in group.ranks:
            with pytest.raises(ConfigurationError, match="this communicator is closed"):
                comm.send(0, "x", np.ones(1))
            with pytest.raises(ConfigurationError, match="this communicator is closed"):
                comm.barrier()


def test_a_peer_that_is_not_connected_for_a_moment_misses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with communicators(2) as group:
        endpoint, tries = group.sockets[0].bus, []
        send = endpoint.send

        def unreachable(to: int, message: Message) -> int:
            tries.append(message.tag)
            if len(tries) < 4:
                raise PeerLost("worker 1 is not reachable from worker 0")
            return send(to, message)

        monkeypatch.setattr(endpoint, "send", unreachable)
        for number in range(3):
            group.ranks[0].send(1, "x", np.array(number))
        assert [int(group.ranks[1].receive("x", 0, PATIENCE)) for _ in range(3)] == [0, 1, 2]
        assert len(set(tries)) == 1


def test_what_waits_for_a_rank_that_dies_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    with communicators(3) as group:
        endpoint = group.sockets[0].bus
        send = endpoint.send

        def unreachable(to: int, message: Message) -> int:
            if to == 1:
                raise PeerLost("worker 1 is not reachable from worker 0")
            return send(to, message)

        monkeypatch.setattr(endpoint, "send", unreachable)
        asked = group.start(lambda comm: comm.request(1, "x"), 0)
        group.lose(1, "worker 1 was killed by SIGKILL")
        assert "worker 1 was killed by SIGKILL" in str(asked[0].exception(PATIENCE))
        group.ranks[0].send(2, "y", np.ones(1))
        assert group.ranks[2].receive("y", 0, PATIENCE) == 1
        assert not group.ranks[0]._engine._held


def full(group: Group, monkeypatch: pytest.MonkeyPatch, tries: float) -> None:
    """The bus of rank 0 has room only after so many tries."""
    bus, tried = group.sockets[0].bus, []
    send = bus.send

    def refusing(to: int, message: Message) -> None:
        tried.append(to)
        if len(tried) <= tries:
            raise Backlog("worker 1 takes no messages")
        send(to, message)

    monkeypatch.setattr(bus, "send", refusing)


def test_what_waits_for_room_is_delivered_before_a_communicator_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    with communicators(2) as group:
        full(group, monkeypatch, 20)
        group.ranks[0].send(1, "last", np.arange(3))
        waiting = group.start(lambda rank: rank.receive("last", 0), 1)
        closing = group.start(lambda rank: rank.close(), 1)
        with pytest.raises(PeerLost, match="worker 1 has left"):  # it only waits for this one's word
            group.ranks[0].receive("x", 1, PATIENCE)
        group.ranks[0].close(PATIENCE)
        assert waiting[0].result(PATIENCE).tolist() == [0, 1, 2]
        closing[0].result(PATIENCE)


def test_what_cannot_be_delivered_before_the_end_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with communicators(2) as group:
        full(group, monkeypatch, float("inf"))
        group.ranks[0].send(1, "last", np.zeros(100))
        with pytest.raises(TimedOut, match=r"worker 0 waited 0\.001 s for 'x'"):
            group.ranks[0].receive("x", 1, 0.001)  # the engine has come to what was sent before
        more = group.start(lambda rank: rank.send(1, "more", np.zeros(100)), 0)
        with pytest.raises(TimedOut, match=r"to receive their messages.*; 800 bytes were not delivered to worker 1"):
            group.ranks[0].close(0.05)
        assert "this communicator is closed" in str(more[0].exception(PATIENCE))


def test_a_supervisor_s_stop_ends_every_wait() -> None:
    with communicators(2) as group:
        waiting = group.start(lambda comm: comm.receive("x"), 0)
        group.say(0, "stop", {"reason": "the run was ended"})
        assert "the run was ended" in str(waiting[0].exception(PATIENCE))
        with pytest.raises(Interrupted, match="the run was ended"):
            group.ranks[0].send(1, "x", np.ones(1))


def test_alone_everything_works() -> None:
    with flockstep.join() as comm:
        assert (comm.rank, comm.workers) == (0, 1)
        array = sample((2, 3), np.float32)
        comm.send(0, "x", array)
        assert same(comm.receive("x"), array)
        comm.serve("twice", lambda source, given: given * 2)
        assert same(comm.request(0, "twice", array), array * 2)
        window = comm.window("w", np.zeros(6))
        window.accumulate(0, array, scale=2.0)
        window.fence()
        assert np.allclose(window.get(0), 2 * array.reshape(-1))
        for total in (comm.all_reduce(array), comm.reduce(array), comm.neighbor_average(array)):
            assert same(total, array)
        assert same(comm.broadcast(array), array)
        assert same(comm.all_gather(array)[0], array)
        assert same(comm.reduce_scatter(array), array.reshape(-1))
        assert same(comm.all_reduce(array, codec="half", average=True), array.astype("f2").astype("f4"))
        comm.barrier()
    with pytest.raises(ConfigurationError, match="this communicator is closed"):
        comm.barrier()
    with pytest.raises(ConfigurationError, match="max_bytes must be >= 1, got 0"):
        flockstep.join(0)
