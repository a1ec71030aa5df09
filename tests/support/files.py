"""Files that flockstep reads, of a real run and beside it, and the ways of damaging them."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import msgspec
import networkx as nx
import numpy as np
import tomli_w
from safetensors.numpy import load as arrays_of
from safetensors.numpy import save

import flockstep
import support.compiler  # noqa: F401
from flockstep.collectives.table import Measured, read_table, write_table
from flockstep.costs.cluster_file import load_cluster
from flockstep.costs.clusters import FOLDER
from flockstep.errors import ConfigurationError
from flockstep.options import SealedOptions
from flockstep.planning.trial_store import TrialStore
from flockstep.planning.trials import Trial
from flockstep.records import checkpoints as disk
from flockstep.records.folder import RunFolder
from flockstep.records.snapshots import Snapshot
from flockstep.records.summary import summarize
from flockstep.runtime.checkpoints import load
from flockstep.runtime.member import NodeSpec
from flockstep.runtime.state import STRUCTURE
from flockstep.sealed import archive
from flockstep.sealed.job import load_sealed
from flockstep.sealed.manifest import MANIFEST as MANIFEST_SECTION
from flockstep.sealed.manifest import TENSORS
from flockstep.strategies.base import Strategy
from flockstep.topologies.weighted import WeightedGraph
from flockstep.trackers.track import follow
from support.damage import Attempt, Change, attempt
from support.jobs import paced
from support.mutations import changed, damaged
from support.processes import RealRun
from support.sealed_jobs import lstm

SHAPES = ["(4611686018427387904,)", "(1073741824, 64)", "(-1,)", "(2, 9999999999999999999)", "()", "(1e9,)", "'x'"]
DTYPES = ["|O", "<U9999999", "|V8", "<f8", "<M8[s]", ">i2", "x"]
SEALED_FILE, JAX_FILE = "model.sealed", "jax.sealed"
MANIFEST = "checkpoints/000001/manifest.json"
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
    arrays = arrays_of(data)
    document = changed(msgspec.msgpack.decode(arrays[STRUCTURE].tobytes()), draw)
    with suppress(ValueError, TypeError, OverflowError):  # such as text with half a character
        arrays[STRUCTURE] = np.frombuffer(msgspec.msgpack.encode(document), np.uint8)
    return save(arrays)


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


def read_graph(folder: Path, name: str) -> object:
    graph = WeightedGraph(path=str(folder / name))
    return graph.graph(4), graph.weights(4)


@dataclass(frozen=True)
class Subject:
    """A file that flockstep reads, and the ways of damaging it."""

    file: str
    read: Callable[[Path], object]
    change: Change = damaged
    sign: Callable[[Path], None] = lambda folder: None


def sealed_section(name: str, damage: Change) -> Change:
    """Damage a section of a sealed job, with hashes that are right again, as an attacker would."""

    def change(data: bytes, draw: random.Random) -> bytes:
        start = len(archive.MAGIC)
        for _ in range(2):  # over the outer header, to the sections
            size = int.from_bytes(data[start : start + archive.LENGTH], "big")
            text, start = data[start + archive.LENGTH :][:size], start + archive.LENGTH + size
        sizes, sections = json.loads(text)["sizes"], dict[str, bytes]()
        for key, count in sizes.items():
            sections[key], start = data[start : start + count], start + count
        with suppress(UnicodeEncodeError):
            sections[name] = damage(sections[name], draw)
        return archive.pack(sections)

    return change


def read_sealed(folder: Path, file: str = SEALED_FILE) -> object:
    job = load_sealed(folder / file, SealedOptions(trust="anyone"))
    with suppress(ConfigurationError):  # it holds no data
        job.data()
    return job.model()


SUBJECTS = {
    "manifest": Subject(MANIFEST, resume, json_document),
    "signed manifest": Subject(MANIFEST, resume, json_document, sign_manifest),
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
    "sealed job": Subject(SEALED_FILE, read_sealed),
    "manifest of a sealed job": Subject(SEALED_FILE, read_sealed, sealed_section(MANIFEST_SECTION, json_document)),
    "weights of a sealed job": Subject(SEALED_FILE, read_sealed, sealed_section(TENSORS, header)),
    "graph": Subject("graph.json", lambda folder: read_graph(folder, "graph.json"), json_document),
    "graph in GraphML": Subject("graph.graphml", lambda folder: read_graph(folder, "graph.graphml")),
    "graph of edges": Subject("graph.txt", lambda folder: read_graph(folder, "graph.txt")),
}

if find_spec("jax") is not None:
    SUBJECTS |= {
        f"{name} of a sealed JAX job": Subject(
            JAX_FILE, lambda folder: read_sealed(folder, JAX_FILE), sealed_section(name, damage)
        )
        for name, damage in ((MANIFEST_SECTION, json_document), ("joint", damaged), ("evaluate", damaged))
    }


def write_all(place: Path, afresh: bool = False) -> Path:
    """The folder of a real run with a checkpoint, and beside its record the other files; `afresh` as in `RealRun`."""
    run = RealRun(
        [
            *("train", paced(place), "-s", "ps(bsp, codec=topk(0.2), feedback=residual)", "-n", "2", "--steps", "40"),
            *("--checkpoint-every", "8", "--evaluate-every", "8", "--keep", "9"),
        ],
        place / "run",
        afresh=afresh,
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
    flockstep.seal(lstm(), out=folder / SEALED_FILE)
    if find_spec("jax") is not None:
        from support.jax_jobs import job

        flockstep.seal(job(), out=folder / JAX_FILE)
    shutil.copy(FOLDER / "two-sites.toml", folder / "cluster.toml")
    graph = nx.Graph([(i, (i + 1) % 4, {"weight": 0.25}) for i in range(4)])
    (folder / "graph.json").write_text(json.dumps(nx.node_link_data(graph, edges="edges")))
    nx.write_graphml(graph, folder / "graph.graphml")
    (folder / "graph.txt").write_text(" ".join(f"{i}-{(i + 1) % 4}:0.25" for i in range(4)))
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
    for file in (to / subject.file, to / MANIFEST):
        data = file.read_bytes()
        file.unlink()
        file.write_bytes(data)
    return to


def damaged_files(name: str, folder: Path, place: Path, count: int, seed: int) -> Iterator[tuple[Attempt, int]]:
    """Read `count` damaged copies of a subject's file; half of them are damaged bytes, half other documents.

    Yields what came of each, and the bytes of the files that it concerns.
    """
    subject, draw = SUBJECTS[name], random.Random(f"{name} {seed}")
    good, manifest = (folder / subject.file).read_bytes(), (folder / MANIFEST).read_bytes()
    copy = copied(folder, place / "copy", subject)
    subject.read(copy)  # loads what is loaded once
    for number in range(count):
        bad = (subject.change if number % 2 else damaged)(good, draw)
        for file, data in ((MANIFEST, manifest), (subject.file, bad)):
            (copy / file).write_bytes(data)
        subject.sign(copy)
        found = attempt(name, number, bad, lambda: subject.read(copy))
        yield found, len(bad) + len(good) + len(manifest)
