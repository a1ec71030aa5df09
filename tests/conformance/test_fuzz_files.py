"""Damaged checkpoints, records and other files that flockstep reads: an error of flockstep or a value, in bounded
memory.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import resource
import shutil
import signal
import tomllib
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec
import numpy as np
import pytest
import tomli_w

import flockstep.transports.wire as wire
from flockstep.collectives.table import Measured, read_table, write_table
from flockstep.costs.cluster_reading import load_cluster
from flockstep.costs.clusters import FOLDER
from flockstep.drivers.checkpoints import load
from flockstep.drivers.member import NodeSpec
from flockstep.drivers.state import STRUCTURE
from flockstep.errors import FlockstepError, ProtocolError
from flockstep.messages import Message
from flockstep.planning.trial_store import TrialStore
from flockstep.planning.trials import Trial
from flockstep.records import checkpoints as disk
from flockstep.records.folder import RunFolder
from flockstep.records.follow import follow
from flockstep.records.safetensors import arrays_in, write_arrays
from flockstep.records.snapshots import Snapshot
from flockstep.records.summary import summarize
from flockstep.strategies.base import Strategy
from support.jobs import paced
from support.matrix import few
from support.mutations import changed, damaged
from support.processes import PATIENCE, RealRun

FACTOR, SLACK = 60, 1 << 20
"""Memory that reading a file may take: so many times the bytes of the file, and so many bytes more."""
LARGEST_GROWTH = 64 << 20
"""Bytes by which the process may grow while it reads all damaged files."""
Change = Callable[[bytes, random.Random], bytes]
SHAPES = ["(4611686018427387904,)", "(1073741824, 64)", "(-1,)", "(2, 9999999999999999999)", "()", "(1e9,)", "'x'"]
DTYPES = ["|O", "<U9999999", "|V8", "<f8", "<M8[s]", ">i2", "x"]
SHARD = "checkpoints/000001/worker-0.safetensors"


def json_document(data: bytes, draw: random.Random) -> bytes:
    return json.dumps(changed(json.loads(data), draw)).encode()


def json_lines(data: bytes, draw: random.Random) -> bytes:
    documents = [json.loads(line) for line in data.splitlines()]
    at = draw.randrange(len(documents))
    documents[at] = changed(documents[at], draw)
    return b"".join(json.dumps(one).encode() + b"\n" for one in documents)


def toml_document(data: bytes, draw: random.Random) -> bytes:
    with suppress(TypeError, ValueError, AttributeError, RecursionError):  # TOML has no word for None
        return tomli_w.dumps(changed(tomllib.loads(data.decode()), draw)).encode()
    return damaged(data, draw)


def header(data: bytes, draw: random.Random) -> bytes:
    """A file of arrays with another header."""
    size = int.from_bytes(data[:8], "little")
    head = json.dumps(changed(json.loads(data[8 : 8 + size]), draw)).encode()
    return len(head).to_bytes(8, "little") + head + data[8 + size :]


def structure(data: bytes, draw: random.Random) -> bytes:
    """A file of arrays with another structure of the node's state."""
    arrays, file = arrays_in(np.frombuffer(data, np.uint8)), io.BytesIO()
    document = changed(msgspec.msgpack.decode(arrays[STRUCTURE].tobytes()), draw)
    with suppress(ValueError, TypeError, OverflowError):  # such as text with half a character
        arrays[STRUCTURE] = np.frombuffer(msgspec.msgpack.encode(document), np.uint8)
    write_arrays(file, arrays)
    return file.getvalue()


def numpy_header(data: bytes, draw: random.Random) -> bytes:
    """A file of numpy that announces another shape or dtype."""
    size = int.from_bytes(data[8:10], "little")
    text = data[10 : 10 + size].decode()
    if draw.random() < 0.7:
        text = text[: text.index("'shape': ") + 9] + draw.choice(SHAPES) + ", }"
    if draw.random() < 0.5:
        text = text.replace("<f4", draw.choice(DTYPES))
    return data[:8] + len(text).to_bytes(2, "little") + text.encode() + data[10 + size :]


def read_record(folder: Path) -> object:
    record = RunFolder(folder)
    return record.read(), record.unfinished, list(follow(record, lambda: None))


def read_without_summary(folder: Path) -> object:
    record = RunFolder(folder)
    return summarize(record.read_config(), record.read_events(), "interrupted")


def resume(folder: Path) -> object:
    """Read what a resumed run reads."""
    checkpoint = disk.newest(folder)
    spec = NodeSpec("run", 0, "", "", "ipc", 5.0, str(folder), 2, 0, checkpoint=str(checkpoint.folder))
    for item in checkpoint.manifest.pending:
        there = msgspec.structs.replace(item.snapshot, path=str(checkpoint.folder / item.snapshot.path))
        there.read()
        there.read_buffers()
    return load(spec, 0, np.load(folder / "result.npy"))


def sign_manifest(folder: Path) -> None:
    """Write the hash of the manifest to the manifest, as an attacker would."""
    file = disk.folders(folder)[-1] / disk.MANIFEST
    with suppress(ValueError, RecursionError):
        manifest = msgspec.json.decode(file.read_bytes(), type=disk.Manifest)
        file.write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, sha256=manifest.digest())))


def sign_shards(folder: Path) -> None:
    """Write the hashes of the files with arrays to the manifest."""
    place = disk.folders(folder)[-1]
    manifest = disk.read_manifest(place)
    shards = [msgspec.structs.replace(one, sha256=disk.digest_of(place / one.file)) for one in manifest.shards]
    signed = msgspec.structs.replace(manifest, shards=tuple(shards))
    (place / disk.MANIFEST).write_bytes(msgspec.json.encode(signed))
    sign_manifest(folder)


def read_collectives(folder: Path) -> object:
    read_table.cache_clear()
    return read_table(str(folder / "collectives.toml"))


@dataclass(frozen=True)
class Subject:
    """A file that flockstep reads, and the ways of damaging it."""

    file: str
    read: Callable[[Path], object]
    change: Change = damaged
    sign: Callable[[Path], None] = lambda folder: None


SUBJECTS = {
    "manifest": Subject("checkpoints/000001/manifest.json", resume, json_document),
    "signed manifest": Subject("checkpoints/000001/manifest.json", resume, json_document, sign_manifest),
    "arrays": Subject(SHARD, resume, header, sign_shards),
    "structure": Subject(SHARD, resume, structure, sign_shards),
    "config": Subject("config.toml", read_record, toml_document),
    "events": Subject("events.jsonl", read_record, json_lines),
    "events without a summary": Subject("events.jsonl", read_without_summary, json_lines),
    "summary": Subject("summary.json", read_record, json_document),
    "schema": Subject("schema.json", lambda folder: RunFolder(folder).read_result(), json_document),
    "result": Subject("result.npy", lambda folder: RunFolder(folder).read_result(), numpy_header),
    "trials": Subject("trials.jsonl", lambda folder: TrialStore({}, folder), json_lines),
    "cluster": Subject("cluster.toml", lambda folder: load_cluster(folder / "cluster.toml"), toml_document),
    "collectives": Subject("collectives.toml", read_collectives, toml_document),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real run with a checkpoint, and beside its record the other files."""
    place = tmp_path_factory.mktemp("written")
    run = RealRun(
        [
            *("train", paced(place), "-s", "ps(bsp, codec=topk(0.2), feedback=residual)", "-n", "2", "--steps", "40"),
            *("--checkpoint-every", "8", "--evaluate-every", "8", "--keep", "9"),
        ],
        place / "run",
    )
    try:
        assert run.end().code == 0, run.err
    finally:
        run.close()
    folder = place / "run"
    for other in disk.folders(folder)[1:]:
        disk.remove(other)
    keep_snapshot(disk.folders(folder)[0])
    TrialStore({}, folder).add(Trial("easgd", 4, 0.1, 0, 0.9, "time", None, 5.0, 10, 100, None, None), 0.1, 5.0)
    write_table(folder / "collectives.toml", [Measured("ring", 4, 1000, 0.001)])
    shutil.copy(FOLDER / "two-sites.toml", folder / "cluster.toml")
    Strategy.parse("ps(bsp)")  # state is read with the classes of modules that are imported
    for subject in SUBJECTS.values():
        subject.read(copied(folder, place / "whole", subject))
        shutil.rmtree(place / "whole")
    return folder


def keep_snapshot(folder: Path) -> None:
    """Add a snapshot to the checkpoint, as one has that was not evaluated."""
    manifest = disk.read_manifest(folder)
    values = np.arange(650, dtype=np.float32).tobytes()
    (folder / "worker-0.1").write_bytes(values)
    snapshot = Snapshot(1.0, 0, "worker-0.1", "float32", 650, 0, 0.5, 12, 10)
    item = disk.Pending(snapshot, hashlib.sha256(values).hexdigest())
    manifest = msgspec.structs.replace(manifest, pending=(item,))
    (folder / disk.MANIFEST).write_bytes(
        msgspec.json.encode(msgspec.structs.replace(manifest, sha256=manifest.digest()))
    )


def copied(folder: Path, to: Path, subject: Subject) -> Path:
    """A copy of the folder that shares all files but those that the subject changes."""
    shutil.copytree(folder, to, copy_function=lambda a, b: Path(b).hardlink_to(a))
    for file in (to / subject.file, to / "checkpoints/000001/manifest.json"):
        data = file.read_bytes()
        file.unlink()
        file.write_bytes(data)
    return to


@contextmanager
def within_patience() -> Iterator[None]:
    """Fail if the body hangs."""

    def hangs(signum: int, frame: FrameType | None) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def peak_of(read: Callable[[], object]) -> tuple[int, bool]:
    """Bytes of memory that reading takes, and whether it gave a value; any error but flockstep's own is raised."""
    tracemalloc.reset_peak()
    before, taken = tracemalloc.get_traced_memory()[0], True
    try:
        with within_patience(), np.errstate(all="ignore"):
            read()
    except FlockstepError:
        taken = False
    return tracemalloc.get_traced_memory()[1] - before, taken


def check_damage(name: str, folder: Path, place: Path, count: int, seed: int = 0) -> None:
    """Read `count` damaged copies of a subject's file; half of them are damaged bytes, half other documents."""
    subject, draw = SUBJECTS[name], random.Random(f"{name} {seed}")
    good, refused = (folder / subject.file).read_bytes(), 0
    manifest = (folder / "checkpoints/000001/manifest.json").read_bytes()
    tracemalloc.start()
    try:
        copy = copied(folder, place / "copy", subject)
        peak_of(lambda: subject.read(copy))  # loads what is loaded once
        for number in range(count):
            change = subject.change if number % 2 else damaged
            bad = change(good, draw)
            for file, data in (("checkpoints/000001/manifest.json", manifest), (subject.file, bad)):
                (copy / file).write_bytes(data)
            subject.sign(copy)
            size, what = len(bad) + len(good) + len(manifest), f"{name}, number {number}"
            try:
                peak, taken = peak_of(lambda: subject.read(copy))
                if peak > FACTOR * size + SLACK:  # it may have loaded something
                    peak, taken = peak_of(lambda: subject.read(copy))
            except Exception as error:
                raise AssertionError(f"{what}: {type(error).__name__}: {error} for {bad[:3000]!r}") from error
            refused += not taken
            assert peak <= FACTOR * size + SLACK, f"{what}: {peak} bytes of memory for {bad[:3000]!r}"
    finally:
        tracemalloc.stop()
    assert refused > count // 20, f"{name}: only {refused} of {count} damaged files were refused"


@pytest.mark.parametrize("name", SUBJECTS)
def test_damaged_files_are_refused_or_read(name: str, written: Path, tmp_path: Path) -> None:
    check_damage(name, written, tmp_path, 24)


@pytest.mark.full
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_hundred_thousand_damaged_files_are_refused_or_read(name: str, written: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")  # the reader of a state that names a device imports it
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    check_damage(name, written, tmp_path, 100_000 // len(SUBJECTS) + 1, seed=1)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < LARGEST_GROWTH


def trusting(folder: Path) -> object:
    """Wrong reader: allocates what the manifest announces."""
    manifest = disk.read_manifest(disk.folders(folder)[-1])
    return np.zeros(max(shard.nbytes for shard in manifest.shards) % (1 << 27), np.uint8).tobytes()


def test_a_reader_that_trusts_a_file_is_caught(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        SUBJECTS, "unchecked", Subject("summary.json", lambda f: json.loads((f / "summary.json").read_bytes()))
    )
    with pytest.raises(
        AssertionError, match=r"unchecked, number .*: (JSONDecodeError|UnicodeDecodeError|RecursionError)"
    ):
        check_damage("unchecked", written, tmp_path / "unchecked", 60)
    file = SUBJECTS["manifest"].file
    monkeypatch.setitem(SUBJECTS, "trusting", Subject(file, trusting, announce_much, sign_manifest))
    with pytest.raises(AssertionError, match=r"trusting, number .* bytes of memory"):
        check_damage("trusting", written, tmp_path / "trusting", 60)


def announce_much(data: bytes, draw: random.Random) -> bytes:
    manifest = json.loads(data)
    draw.choice(manifest["shards"])["nbytes"] = draw.randrange(1 << 25, 1 << 26)
    return json.dumps(manifest).encode()


@pytest.mark.parametrize("frames", few([3000, 1_000_000], 3000))
def test_damaged_frames_are_refused_or_messages(frames: int) -> None:
    """Each is a header and a payload that were one message of a run."""
    mine, draw, taken = wire.SenderIdentity("run", 2, "0123456789abcdef", 40), random.Random(0), 0
    theirs = wire.SenderIdentity("run", 1, "0123456789abcdef", 40)
    message = Message(1, "push", np.arange(10, dtype=np.float32), {"lr": 0.1}, number=1)
    good, payload = wire.encode(message, theirs), bytes(40)
    document = msgspec.msgpack.decode(good)
    tracemalloc.start()
    try:
        for number in range(frames):
            try:
                bad = damaged(good, draw) if number % 2 else msgspec.msgpack.encode(changed(document, draw))
            except (OverflowError, ValueError):
                continue
            body = draw.choice([payload, payload, payload[:39], b"", None])
            mine.heard.clear()
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with suppress(ProtocolError):
                wire.decode(bad, None if body is None else memoryview(body), 1, mine)
                taken += 1
            assert tracemalloc.get_traced_memory()[1] - before < 64 * len(bad) + (1 << 17), bad
    finally:
        tracemalloc.stop()
    assert 0 < taken < frames // 2
