"""The state of programs, encoded as bytes and decoded."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from flockstep.errors import ConfigurationError, ProtocolError
from flockstep.messages import Message
from flockstep.runtime.state import from_bytes, to_bytes


@dataclass
class Inner:
    array: Any
    names: tuple[str, ...] = ()


@dataclass
class OuterOptimizer:
    inner: Inner
    queue: deque[int] = field(default_factory=deque)
    large: int = 0
    table: dict[tuple[int, int], float] = field(default_factory=dict)


class NoData:
    pass


def test_everything_comes_back_in_every_bit() -> None:
    array = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    array[0, 0] = np.nan
    given = OuterOptimizer(Inner(array, ("a", "b")), deque([1, 2]), 1 << 80, {(1, 2): -0.0})
    found = from_bytes(to_bytes(given))
    assert type(found) is OuterOptimizer
    assert found.inner.array.tobytes() == array.tobytes()
    assert found.inner.array.dtype == array.dtype
    assert found.inner.array.flags.writeable
    assert (found.inner.names, found.queue, found.large) == (("a", "b"), deque([1, 2]), 1 << 80)
    assert np.signbit(found.table[1, 2])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8", "uint64", "bool"])
def test_arrays_of_every_kind(dtype: str) -> None:
    from flockstep.arrays.kernels import numpy_dtype

    array = np.arange(6).astype(numpy_dtype(dtype))
    array.flags.writeable = False
    found = from_bytes(to_bytes([array]))[0]
    assert (found.dtype, found.tobytes(), found.flags.writeable) == (array.dtype, array.tobytes(), False)


def test_what_occurs_twice_is_one_thing() -> None:
    array = np.zeros(3)
    found = from_bytes(to_bytes([array, Inner(array)]))
    found[0][1] = 7
    assert found[1].array[1] == 7
    array[0] = 5
    assert found[0][0] == 0


def test_random_streams_go_on() -> None:
    random = np.random.default_rng(3)
    random.normal(size=5)
    found = from_bytes(to_bytes(random))
    assert found.normal(size=4).tolist() == random.normal(size=4).tolist()


def test_generators_spawn_the_same_streams() -> None:
    random = np.random.default_rng([5, 7])
    random.spawn(2)
    found = from_bytes(to_bytes(random))
    assert [one.random() for one in found.spawn(2)] == [one.random() for one in random.spawn(2)]


def test_generators_of_other_kinds_are_refused() -> None:
    for kind in (np.random.Philox, np.random.SFC64, np.random.PCG64DXSM):
        with pytest.raises(
            ConfigurationError, match=rf"state is a generator of {kind.__name__}, .*default_rng\(seed\)"
        ):
            to_bytes(np.random.Generator(kind(0)))


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_tensors_that_are_more_than_numbers_are_refused() -> None:
    torch = pytest.importorskip("torch")
    linear = torch.nn.Linear(2, 1)
    for tensor in (
        linear.weight,
        torch.eye(2).to_sparse(),
        torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8),
    ):
        with pytest.raises(ConfigurationError, match=r"state\['w'\] is not a plain tensor, and cannot be saved: store"):
            to_bytes({"w": tensor})
    found = from_bytes(to_bytes(linear.state_dict()))
    assert torch.equal(found["weight"], linear.weight)


def test_messages_and_counters() -> None:
    message = Message(2, "push", np.ones(2), {"version": 3}, 4, 5, 6)
    found, counts = from_bytes(to_bytes((message, Counter(a=2))))
    assert (found.source, found.tag, found.note, found.step, found.number, found.reply_to) == (
        2, "push", {"version": 3}, 4, 5, 6,
    )  # fmt: skip
    assert counts["b"] == 0
    assert counts["a"] == 2


async def program() -> None:
    """Nothing."""


def test_what_is_no_data_is_refused_by_its_place() -> None:
    running = program()
    for thing in (running, NoData(), open):
        with pytest.raises(ConfigurationError, match=r"state\.inner\.array is .* which cannot be saved"):
            to_bytes(OuterOptimizer(Inner(thing)))
    running.close()


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (["data", 0, "os", "system", []], "os.system is not a data class"),
        (["data", 0, "subprocess", "Popen", [["args", "true"]]], "subprocess.Popen is not a data class"),
        (["data", 0, "no.such.module", "Thing", []], "cannot be read: KeyError: 'no.such.module'"),
        (["data", 0, __name__, "Inner", [["other", 1]]], "the fields of .*Inner differ from those saved: array, other"),
        (["data", 0, __name__, "Inner", []], "the fields of .*Inner differ from those saved: array"),
        (["again", 3], "cannot be read: KeyError: 3"),
        (["array", 0, "float32", [3], True, b"xx"], "cannot be read: ValueError: buffer size"),
        (["unknown", 0, 1], "cannot be read: "),
        (["tuple"], "cannot be read: "),
    ],
)
def test_what_is_none_of_ours_is_refused(value: Any, rule: str) -> None:
    with pytest.raises(ProtocolError, match=rule):
        from_bytes(msgspec.msgpack.encode(value))


class Pair(NamedTuple):
    first: Any
    second: int


def test_named_tuples_and_bounded_queues_keep_their_kind() -> None:
    pair, queue = from_bytes(to_bytes((Pair(np.ones(2), 3), deque([1, 2], maxlen=2))))
    assert type(pair) is Pair
    assert (pair.first.tolist(), pair.second, queue.maxlen) == ([1, 1], 3, 2)


def test_what_would_not_come_back_as_it_was_is_refused() -> None:
    for thing in (defaultdict(int), np.ma.masked_array([1, 2]), np.ones(2, ">f4")):
        with pytest.raises(ConfigurationError, match="cannot be saved"):
            to_bytes(thing)
