"""The wire format: what is not as agreed is refused with a sentence, whatever the bytes; nothing else comes out."""

from __future__ import annotations

import ast
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import flockstep.links.wire as wire
from flockstep.arrays.kernels import numpy_dtype
from flockstep.errors import ProtocolError
from flockstep.links.wire import DTYPES, GREETING, MAX_HEADER, PROTOCOL, SenderIdentity, decode, encode
from flockstep.messages import Message, Note

SCHEMA = "0123456789abcdef"
WEIGHTS = 10


def identity(address: int) -> SenderIdentity:
    return SenderIdentity("run", address, SCHEMA, WEIGHTS * 4)


def payload(array: Any) -> memoryview:
    return memoryview(np.ascontiguousarray(array).view(np.uint8)) if len(array) else memoryview(b"")


def header(**changes: Any) -> bytes:
    """The header of a good first message of worker 1, and what is changed in it."""
    plain = {
        "protocol": PROTOCOL,
        "run": "run",
        "source": 1,
        "incarnation": 0,
        "epoch": 0,
        "schema": SCHEMA,
        "tag": "push",
        "step": 3,
        "number": 1,
        "reply_to": 0,
        "dtype": "float32",
        "size": WEIGHTS,
        "place": -1,
        "start": 0,
        "note": {"version": 3, "lr": 0.1},
    }
    assert set(changes) <= set(plain)
    return msgspec.msgpack.encode(list((plain | changes).values()))


GOOD = payload(np.arange(WEIGHTS, dtype=np.float32))


@given(
    st.sampled_from(sorted(DTYPES)),
    st.integers(0, 5),
    st.dictionaries(st.text(max_size=5), st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text()),
    st.integers(0, 2**40),
    st.text(max_size=9),
)
def test_every_message_arrives_as_it_was_sent(dtype: str, size: int, note: dict[str, Any], step: int, tag: str) -> None:
    array = np.arange(size).astype(numpy_dtype(dtype))
    sender, receiver = identity(1), identity(2)
    for number in (1, 2):
        sent = Message(1, tag, array, note, step, number, number - 1)
        got = decode(encode(sent, sender), payload(array), 1, receiver)
        assert (got.source, got.tag, got.note, got.step, got.number, got.reply_to) == (
            1,
            tag,
            note,
            step,
            number,
            number - 1,
        )
        assert got.array is not None
        assert got.array.dtype == array.dtype
        assert got.array.tolist() == array.tolist()
        assert not got.array.flags.writeable


def test_a_message_without_an_array_is_another_one_than_with_an_empty_one() -> None:
    for array in (None, np.zeros(0, np.float32)):
        message = Message(1, "pull", array, number=1)
        got = decode(encode(message, identity(1)), None if array is None else memoryview(b""), 1, identity(2))
        assert (got.array is None) == (array is None)


def test_the_good_message_of_these_tests_is_good() -> None:
    """Control of all refusals below: the unchanged message is accepted."""
    got = decode(header(), GOOD, 1, identity(2))
    assert got.array is not None
    assert got.array.tolist() == list(range(WEIGHTS))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"protocol": PROTOCOL + 1},
            f"worker 1 uses protocol {PROTOCOL + 1}, but this node uses protocol {PROTOCOL}",
        ),
        ({"run": "another"}, "worker 1 belongs to run another, but this node belongs to run run"),
        ({"source": 3}, "worker 1 claims to be worker 3"),
        ({"source": -1}, "worker 1 claims to be server 0"),
        ({"schema": "f" * 16}, f"worker 1 has a model with schema {'f' * 16}, but this node has schema {SCHEMA}"),
        ({"epoch": 1}, "worker 1 is in epoch 1, but this node is in epoch 0"),
        ({"number": 2}, "worker 1 sent message 2 when message 1 was expected: a message was lost or repeated"),
        ({"number": 0}, "worker 1 sent message 0 when message 1 was expected"),
        ({"size": WEIGHTS + 1}, "worker 1 announced 44 bytes with 'push', but the model has only 40"),
        ({"size": 1 << 62}, "announced 18446744073709551616 bytes"),
        ({"size": -1}, "worker 1 announced -4 bytes"),
        ({"size": WEIGHTS - 1}, "worker 1 sent 40 bytes with 'push', but the header announced 36"),
        ({"dtype": "float64", "size": 5, "tag": "x"}, None),
        ({"dtype": "float16"}, "worker 1 sent 40 bytes with 'push', but the header announced 20"),
        ({"dtype": "object"}, "worker 1 sent an array of 'object'; allowed: bfloat16, "),
        ({"dtype": "V40", "size": 1}, "worker 1 sent an array of 'V40'"),
        ({"dtype": "complex64", "size": 5}, "worker 1 sent an array of 'complex64'"),
        ({"dtype": ">f4"}, "worker 1 sent an array of '>f4'"),
        ({"dtype": ""}, "worker 1 sent 40 bytes with 'push', but the header announced no bytes"),
        ({"tag": 5}, f"does not follow protocol {PROTOCOL}: Expected `str`, got `int`"),
        ({"step": 1.5}, "Expected `int`, got `float`"),
        ({"note": {"lr": [1]}}, "Expected `int | float | str`, got `array`"),
        ({"note": {"x": "y" * MAX_HEADER}}, f"bytes; at most {MAX_HEADER} are allowed"),
    ],
)
def test_what_is_not_as_agreed_is_refused(changes: dict[str, Any], sentence: str | None) -> None:
    receiver = identity(2)
    if sentence is None:
        assert decode(header(**changes), GOOD, 1, receiver).array is not None
        return
    with pytest.raises(ProtocolError, match=re.escape(sentence)):
        decode(header(**changes), GOOD, 1, receiver)
    assert decode(header(), GOOD, 1, receiver).number == 1, "what was refused does not count in the sequence"


@pytest.mark.parametrize("data", [None, memoryview(b""), GOOD[:-1], memoryview(bytes(GOOD) + b"\0")])
def test_a_payload_of_another_length_is_refused(data: memoryview | None) -> None:
    with pytest.raises(
        ProtocolError, match=f"sent {0 if data is None else len(data)} bytes with 'push', but the header"
    ):
        decode(header(), data, 1, identity(2))


def test_gaps_and_repetitions_in_the_sequence_are_refused() -> None:
    receiver = identity(2)
    for number in (1, 2, 3):
        decode(header(number=number), GOOD, 1, receiver)
    for wrong in (3, 1, 5, -1):
        with pytest.raises(ProtocolError, match=f"sent message {wrong} when message 4 was expected"):
            decode(header(number=wrong), GOOD, 1, receiver)
    decode(header(number=4), GOOD, 1, receiver)
    decode(header(number=1, source=0), GOOD, 0, receiver)  # every sender counts for itself


class Pushed(Note, frozen=True):
    version: Annotated[int, msgspec.Meta(ge=0)]
    lr: float
    ranks: tuple[int, ...] = ()


class Held(Note, frozen=True):
    version: int


NOTES = {"push": Pushed, "push/bucket": Pushed, "reply to push": Held, "reply to push/bucket": Held}


@pytest.mark.parametrize("channel", ["", "/bucket"])
def test_a_note_arrives_as_what_the_strategy_declares(channel: str) -> None:
    sender, receiver = identity(1), replace(identity(2), notes=NOTES)
    for number, (note, reply_to) in enumerate(((Pushed(3, 0.5, (1, 2)), 0), (Held(4), 7)), 1):
        sent = Message(1, "push" + channel, None, note, number=number, reply_to=reply_to)
        got = decode(encode(sent, sender), None, 1, receiver)
        assert type(got.note) is type(note)
        assert got.note == note


@pytest.mark.parametrize(
    ("note", "reply_to", "sentence"),
    [
        (
            {"version": 3},
            0,
            "worker 1 sent 'push' with a note that is not of type Pushed: Object missing required field `lr`",
        ),
        ({"version": "3", "lr": 0.1}, 0, "not of type Pushed: Expected `int`, got `str` - at `$.version`"),
        ({"version": -1, "lr": 0.1}, 0, "not of type Pushed: Expected `int` >= 0 - at `$.version`"),
        (
            {"version": 3, "lr": 0.1, "ranks": "1 2"},
            0,
            "not of type Pushed: Expected `array`, got `str` - at `$.ranks`",
        ),
        ({"version": 3, "lr": 0.1, "more": 1}, 0, "not of type Pushed: Object contains unknown field `more`"),
        ([3, 0.1], 0, "not of type Pushed: Expected `object`, got `array`"),
        (None, 0, "not of type Pushed: Expected `object`, got `None`"),
        ({"version": 3, "lr": 0.1}, 1, "not of type Held: Object contains unknown field `lr`"),
    ],
)
def test_a_note_that_is_not_as_declared_is_refused(note: Any, reply_to: int, sentence: str) -> None:
    receiver = replace(identity(2), notes=NOTES)
    with pytest.raises(ProtocolError, match=re.escape(sentence)):
        decode(header(note=note, reply_to=reply_to), GOOD, 1, receiver)
    assert receiver.heard == {}, "what was refused does not count in the sequence"


FIELDS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.sampled_from(["run", SCHEMA, "push", "float32", *sorted(DTYPES), PROTOCOL, 1, 0, WEIGHTS]),
    st.dictionaries(st.text(max_size=4), st.integers().filter(lambda i: -(2**63) <= i < 2**64) | st.text(), max_size=3),
    st.lists(st.integers(0, 9), max_size=3),
)


def refused_or_valid(data: bytes, array: bytes | None) -> None:
    receiver, refusal = replace(identity(2), notes=NOTES), None
    try:
        message = decode(data, None if array is None else memoryview(array), 1, receiver)
    except ProtocolError as error:
        refusal = error
    if refusal is not None:
        assert str(refusal).startswith("worker 1 ")
        assert receiver.heard == {}
        return
    assert message.source == 1
    assert message.payload_bytes == (0 if array is None else len(array))
    assert message.payload_bytes <= WEIGHTS * 4


@given(st.binary(max_size=300), st.none() | st.binary(max_size=60))
@example(b"\x9e\x01\xa2\xff\xfe", None)  # text that is not UTF-8
@example(b"\xdf\xff\xff\xff\xff", None)
@example(b"\x91" * 5000, None)
@example(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", b"")
@example(b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.", None)
def test_any_bytes_are_refused_with_a_sentence_or_valid(data: bytes, array: bytes | None) -> None:
    refused_or_valid(data, array)


@given(st.lists(FIELDS, min_size=12, max_size=16), st.none() | st.binary(max_size=60))
def test_any_fields_are_refused_with_a_sentence_or_valid(fields: list[Any], array: bytes | None) -> None:
    refused_or_valid(msgspec.msgpack.encode(fields), array)


@given(st.data())
def test_any_damage_to_a_good_message_is_refused_or_harmless(data: st.DataObject) -> None:
    good = bytearray(header())
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good)) | st.just(len(good)))
    refused_or_valid(bytes(good[:cut]), bytes(GOOD))


@pytest.mark.parametrize(
    "data",
    [
        header(size=1 << 40),
        header(dtype="float64", size=(1 << 60) + 1),
        b"\xdd\xff\xff\xff\xff",  # an array of four billion elements
        b"\x9e\x01\xdb\xff\xff\xff\xf0run",  # a text of four billion bytes
        header()[:-1] + b"\xdf\xff\xff\xff\xff",
    ],
)
def test_nothing_is_allocated_because_somebody_announced_it(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=rf"the model has only 40|does not follow protocol {PROTOCOL}: "):
            decode(data, GOOD, 1, identity(2))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_greeting_has_no_number() -> None:
    sender, receiver = identity(1), identity(2)
    decode(encode(Message(1, GREETING), sender), None, 1, receiver)
    with pytest.raises(ProtocolError, match="sent message 1 when message 0 was expected"):
        decode(encode(Message(1, GREETING, number=1), sender), None, 1, receiver)
    assert decode(encode(Message(1, "a", number=1), sender), None, 1, receiver).number == 1


def test_a_greeting_answers_no_request() -> None:
    """The note of a reply is a mapping, from which a node that admits a peer could read no session."""
    sender, receiver = identity(1), identity(2)
    assert wire.decode_greeting(encode(Message(1, GREETING), sender), receiver).note == wire.Greeting()
    with pytest.raises(ProtocolError, match="instead of a greeting"):
        wire.decode_greeting(encode(Message(1, GREETING, reply_to=1), sender), receiver)


UNSAFE = {
    "pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "eval",
    "exec",
    "send_pyobj",
    "recv_pyobj",
    "import_module",
}


@pytest.mark.parametrize("folder", ["links", "runtime", "launchers"])
def test_nothing_on_the_wire_can_name_code(folder: str) -> None:
    files = sorted((Path(wire.__file__).parents[1] / folder).glob("*.py"))
    assert files
    for file in files:
        tree = ast.parse(file.read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names |= {n.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for n in node.names}
        allowed = (
            {"import_module"} if file.name in ("threads.py", "state.py") else set()
        )  # of a module that the file itself names
        if file.name == "function_entry.py":  # reads files of a folder that only this user may enter
            allowed = {"pickle", "cloudpickle"}
        assert names & UNSAFE <= allowed, file
