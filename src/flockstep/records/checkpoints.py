"""The checkpoints of a run on disk: a folder for each, with a file of arrays for each node, and a manifest.

Every file is written under another name, synchronized with the disk, and then renamed. The manifest is written last, so
a checkpoint without a manifest is incomplete. The manifest holds the hash of every other file, and its own hash.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, ProtocolError
from flockstep.messages import Address, node_name
from flockstep.records.access import ArrivingFile, file_of, make_folder, synchronize, whole, write_whole
from flockstep.records.failpoints import reach
from flockstep.records.snapshots import Snapshot

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
FORMAT = 2

_NUMBER = re.compile("[0-9]+")


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a checkpoint, which holds the state of one node."""

    node: int
    file: str
    step: int
    """Number of steps of a worker that its saved state includes; 0 for a server."""
    nbytes: int
    sha256: str


class Pending(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A snapshot that was not yet evaluated; its path is the name of a file in the checkpoint's folder."""

    snapshot: Snapshot
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint's content: its files with their hashes, and the run to which the checkpoint belongs."""

    format: int
    version: str
    """Version of flockstep that wrote the checkpoint."""
    strategy: str
    workers: int
    config: str
    """SHA-256 of the run's configuration as a TOML document, in hexadecimal digits."""
    seconds: float
    """Seconds from the start of the run until all nodes had stopped for the checkpoint."""
    shards: tuple[Shard, ...]
    pending: tuple[Pending, ...] = ()
    lost: dict[int, int] = {}
    """Lost workers, whose states the checkpoint does not hold: rank → number of steps that the worker had taken."""
    replica_size: int = 1
    """Number of files with the state of one replica of a script, which as many processes held."""
    sha256: str = ""
    """Hash of the manifest with this field empty."""

    @property
    def steps(self) -> dict[Address, int]:
        """Rank → number of steps that the worker had taken."""
        return {shard.node: shard.step for shard in self.shards if shard.node >= 0}

    def unevaluated(self, evaluated: Collection[float]) -> list[Snapshot]:
        """Return the snapshots that have no evaluation; `evaluated` holds the times of all evaluations, in seconds."""
        items, ticks = [one.snapshot for one in self.pending], dict[float | None, float]()
        for item in items:
            ticks[item.tick] = max(item.seconds, ticks.get(item.tick, 0.0))
        return [item for item in items if ticks[item.tick] not in evaluated]

    def digest(self) -> str:
        """SHA-256 of the manifest with an empty field `sha256`, in hexadecimal digits."""
        return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(self, sha256=""))).hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose files are all undamaged."""

    folder: Path
    manifest: Manifest

    def arrays(self, node: Address) -> dict[str, FlatArray]:
        """Return the arrays of a node's saved state; refuse a damaged file."""
        shard = next((shard for shard in self.manifest.shards if shard.node == node), None)
        if shard is None:
            raise ConfigurationError(
                f"{self.folder} does not hold the state of {node_name(node)}; {_way_out(self.folder)}"
            )
        file = self.folder / shard.file
        self._require_whole(file, shard.sha256)
        try:
            return load_file(file)
        except (SafetensorError, ValueError, TypeError, LookupError, AttributeError, OSError, MemoryError) as error:
            raise ConfigurationError(f"{file} is not a file of arrays: {error}; {_way_out(self.folder)}") from None

    def check(self) -> None:
        """Raise `ConfigurationError` if a file of the checkpoint is damaged."""
        for shard in self.manifest.shards:
            self.arrays(shard.node)
        for item in self.manifest.pending:
            self._require_whole(self.folder / item.snapshot.path, item.sha256)

    def _require_whole(self, file: Path, sha256: str) -> None:
        try:
            undamaged = digest_of(file) == sha256
        except OSError as error:
            raise ConfigurationError(f"{file} cannot be read: {error.strerror}; {_way_out(self.folder)}") from None
        if not undamaged:
            raise ConfigurationError(f"{file} is damaged: its bytes differ from those written; {_way_out(self.folder)}")


def digest_of(file: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def keep_pending(folder: Path, snapshots: Iterable[Snapshot]) -> tuple[Pending, ...]:
    """Synchronize the files of snapshots in the folder of a checkpoint with the disk, and return their hashes."""
    found = []
    for item in snapshots:
        with (folder / item.path).open("rb") as file:
            os.fsync(file.fileno())
        found.append(Pending(item, digest_of(folder / item.path)))
    return tuple(found)


def shard_file(node: Address) -> str:
    """Return the name of the file with a node's state."""
    return f"{file_of(node)}.safetensors"


def write_shard(folder: Path, node: Address, step: int, arrays: Mapping[str, FlatArray]) -> Shard:
    """Write a node's state to the folder of a checkpoint."""
    path = folder / shard_file(node)
    try:
        with whole(path, durable=True) as half:
            save_file(dict(arrays), half)  # the library replaces `half` by a file of its own, so the hash is read back
            shard = Shard(node, path.name, step, half.stat().st_size, digest_of(half))
            reach("shard.written")
    except SafetensorError as error:
        raise ConfigurationError(str(error)) from None
    reach("shard.renamed")
    return shard


class ArrivingShard(ArrivingFile):
    """The file of a checkpoint with a node's state, `shard`, while its parts arrive from another host."""

    def __init__(self, folder: Path, shard: Shard):
        super().__init__(folder / shard.file, durable=True)
        self._shard, self._digest, self._nbytes = shard, hashlib.sha256(), 0

    def add(self, part: memoryview) -> None:
        super().add(part)
        self._digest.update(part)
        self._nbytes += len(part)

    def finish(self) -> None:
        if (self._nbytes, self._digest.hexdigest()) != (self._shard.nbytes, self._shard.sha256):
            raise ProtocolError(f"{self._shard.file} did not arrive as {node_name(self._shard.node)} wrote it")
        reach("shard.written")
        super().finish()
        reach("shard.renamed")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which makes the checkpoint complete."""
    signed = msgspec.structs.replace(manifest, sha256=manifest.digest())
    reach("manifest.begun")
    write_whole(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(signed), indent=1), durable=True)
    reach("manifest.renamed")


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint; refuse one that is missing, damaged, or of another version's format."""
    file = folder / MANIFEST
    try:
        data = file.read_bytes()
        seen = msgspec.json.decode(data, type=_Version)
        if seen.format != FORMAT:
            raise ConfigurationError(
                f"{folder} has format {seen.format} and was written by flockstep {seen.version}, but this version "
                f"reads format {FORMAT}; resume with flockstep {seen.version}"
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}; {_way_out(folder)}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"{file} is damaged: {error}; {_way_out(folder)}") from None
    names = [*(shard.file for shard in manifest.shards), *(item.snapshot.path for item in manifest.pending)]
    if manifest.digest() != manifest.sha256 or not all(map(_plain, names)):
        raise ConfigurationError(f"{file} is damaged: its hash does not match its content; {_way_out(folder)}")
    return manifest


def keep_config(record: Path, digest: str, text: str) -> None:
    """Store a configuration of a run whose number of workers changes beside the run's checkpoints."""
    write_whole(record / CHECKPOINTS / f"{digest}.toml", text.encode(), durable=True)


def kept_config(record: Path, digest: str) -> str | None:
    """Return the stored configuration with the given SHA-256; None if no such configuration is stored."""
    try:
        text = (record / CHECKPOINTS / f"{digest}.toml").read_bytes()
    except OSError:
        return None
    return text.decode() if hashlib.sha256(text).hexdigest() == digest else None


def folders(record: Path) -> list[Path]:
    """Return the folders of all checkpoints of a run, complete or not, oldest first; other folders are ignored."""
    found = [path for path in (record / CHECKPOINTS).glob("[0-9]*") if _NUMBER.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name))


def new_folder(record: Path, last: Path | None = None) -> Path:
    """Create the folder of the next checkpoint; its number is above that of `last`, to which nodes may still write."""
    number = max((int(path.name) for path in [*folders(record), *([] if last is None else [last])]), default=0) + 1
    folder = record / CHECKPOINTS / f"{number:06d}"
    make_folder(folder)
    synchronize(folder.parent)
    synchronize(record)
    return folder


def newest(record: Path) -> Checkpoint:
    """Return the newest complete checkpoint of a run; refuse it if a file is damaged."""
    complete = _complete(record)
    if not complete:
        raise ConfigurationError(
            f"{record} holds no complete checkpoint; repeat the run, with --checkpoint-every for checkpoints"
        )
    checkpoint = Checkpoint(complete[-1], read_manifest(complete[-1]))
    checkpoint.check()
    return checkpoint


def prune(record: Path, keep: int) -> None:
    """Remove all checkpoints except the newest `keep` complete checkpoints."""
    kept = _complete(record)[-keep:]
    for folder in folders(record):
        if folder not in kept:
            remove(folder)


def remove(folder: Path) -> None:
    """Remove a checkpoint. If the removal is interrupted, the remaining files count as an incomplete checkpoint."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


class _Version(msgspec.Struct):
    format: int
    version: str


def _complete(record: Path) -> list[Path]:
    return [folder for folder in folders(record) if (folder / MANIFEST).exists()]


def _plain(name: str) -> bool:
    """Whether a name is that of a file in a folder, and no path to another folder."""
    return name not in ("", "..") and Path(name).name == name and "\0" not in name


def _way_out(folder: Path) -> str:
    return f"delete {folder} to resume from the previous checkpoint"
