"""Handles the output of a run's scripts: on the terminal, in files, or both."""

from __future__ import annotations

import contextlib
import re
import select
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from os import write
from pathlib import Path
from typing import IO

from flockstep.errors import ConfigurationError
from flockstep.options import OutputRanks
from flockstep.records.config import RunConfig

OUT, ERR = 1, 2
"""The streams of a script: standard output and standard error."""
NAMES = {OUT: "out", ERR: "err"}
"""Stream → suffix of the name of the file with the stream's output."""
Sink = Callable[[int, bytes], None]
"""Function that receives a part of a script's output: the stream (`OUT` or `ERR`), and whole lines or the last bytes.
Different threads may call it for the two streams.
"""
LAST_WORDS = 4000
"""Number of bytes from the end of a script's hidden standard error that are kept, to be shown if the script fails."""
_ONE_AT_A_TIME = threading.Lock()


def to_terminal(stream: int, data: bytes) -> None:
    """Write to this process's own standard output or error, without mixing lines of several scripts.

    If the reader has closed the output, the output is dropped, because a script must not wait forever.
    """
    out = (sys.stdout if stream == OUT else sys.stderr).fileno()
    rest = memoryview(data)
    with _ONE_AT_A_TIME, contextlib.suppress(OSError):
        while rest:
            try:
                rest = rest[write(out, rest) :]
            except BlockingIOError:
                select.select([], [out], [])


@dataclass(frozen=True)
class OutputOptions:
    """A user's options for the scripts' output."""

    ranks: OutputRanks = "all"
    """Ranks whose output is shown."""
    prefix: bool = False
    """Whether each line that is shown begins with its rank."""
    folder: Path | None = None
    """Folder for the output of every rank, in `rank-3.out` and `rank-3.err`; None if no files are written."""

    def kept_in(self, config: RunConfig) -> RunConfig:
        """Return the configuration with these options stored in it, so that a resumed run has them, too."""
        ranks = None if self.ranks == "all" else self.ranks
        folder = None if self.folder is None else str(self.folder.resolve())
        return replace(config, output=ranks, prefix=self.prefix or None, rank_output=folder)


@dataclass(frozen=True)
class Output(OutputOptions):
    """Options for the scripts' output, with the function that shows it."""

    show: Sink = to_terminal
    """Function that shows whole lines of output."""
    continues: bool = False
    """Whether output is appended to existing files, because the run is resumed."""

    @classmethod
    def of(cls, config: RunConfig, show: Sink) -> Output:
        """Return the output options of a run that is resumed; output is appended to its files."""
        folder = None if config.rank_output is None else Path(config.rank_output)
        return cls(config.output or "all", bool(config.prefix), folder, show, continues=True)

    def require_folder(self, ranks: range, workers: int, overwrite: bool) -> None:
        """Check that the output files of `ranks`, the workers of this host, can be created.

        Raises:
            ConfigurationError: the folder is a file, or it holds the output of an earlier run and `overwrite` is false.
        """
        if self.folder is None or not self.folder.exists():
            return
        if not self.folder.is_dir():
            raise ConfigurationError(f"{self.folder} is a file, not a folder; choose another --rank-output folder")
        if not overwrite and (there := _earlier(self.folder, ranks, workers)):
            raise ConfigurationError(
                f"{self.folder} holds the output of an earlier run, such as {there[0].name}; choose another "
                "--rank-output folder, or replace the files with --overwrite"
            )

    def sinks(self, ranks: range, workers: int) -> dict[int, RankOutput]:
        """Return a sink for each of `ranks`; if there is a folder, create its files.

        The files of an earlier run are removed, unless `continues`.

        Raises:
            ConfigurationError: a file cannot be created.
        """
        try:
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
                for file in [] if self.continues else _earlier(self.folder, ranks, workers):
                    file.unlink(missing_ok=True)
            return {rank: self.sink(rank) for rank in ranks}
        except OSError as error:
            raise ConfigurationError(
                f"{error.filename} could not be written: {error.strerror}; choose another --rank-output folder"
            ) from None

    def sink(self, rank: int) -> RankOutput:
        """Return the sink of a rank; its files are appended to."""
        return RankOutput(rank, self)


SHOWN = Output()
"""Options under which the output of all ranks is shown unchanged."""


def _earlier(folder: Path, ranks: range, workers: int) -> list[Path]:
    """Files of an earlier run: of `ranks`, and of ranks that this run of `workers` workers does not have.

    Files of other ranks belong to other hosts of this run, if all hosts write to one folder.
    """
    found = [(re.fullmatch(r"rank-([0-9]+)\.(out|err)", file.name), file) for file in sorted(folder.iterdir())]
    return [file for its, file in found if its is not None and (int(its[1]) in ranks or int(its[1]) >= workers)]


class RankOutput:
    """Handles the output of one rank's script: shows it, or shows the end of its standard error if the script fails,
    and writes it to files.
    """

    def __init__(self, rank: int, output: Output):
        self._show = output.show
        self._prefix = f"[rank {rank}] ".encode() if output.prefix else b""
        self._hidden = output.ranks == "none" or (output.ranks == "rank0" and rank > 0)
        self._unsaid = bytearray()
        self._before = dict.fromkeys(NAMES, b"\n")
        folder = output.folder
        files = {} if folder is None else {stream: folder / f"rank-{rank}.{name}" for stream, name in NAMES.items()}
        self._files: dict[int, IO[bytes]] = {stream: file.open("ab", 0) for stream, file in files.items()}

    def __call__(self, stream: int, data: bytes) -> None:
        """Take a part of the output; a disk that takes no more is told of once, and the script continues."""
        if (file := self._files.get(stream)) is not None:
            self._keep(stream, file, data)
        if not self._hidden:
            self._show(stream, marked(data, self._prefix, self._before[stream]))
            self._before[stream] = data[-1:]
        elif stream == ERR:
            self._unsaid = (self._unsaid + data)[-LAST_WORDS:]

    def _keep(self, stream: int, file: IO[bytes], data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError as error:
            self._files.pop(stream).close()
            why = f"{file.name} could not be written: {error.strerror}"
            sys.stderr.write(f"flockstep: {why}; later output is missing from this file\n")

    def close(self, failed: bool) -> None:
        """End the output of a script; if the script has `failed` and its output is hidden, show the end of its
        output.
        """
        if failed and self._unsaid:
            self._show(ERR, marked(bytes(self._unsaid), self._prefix, b"\n"))
        while self._files:
            self._files.popitem()[1].close()


def marked(data: bytes, prefix: bytes, before: bytes) -> bytes:
    """Return output with `prefix` before each line; `before` is the byte before `data`, which shows whether `data`
    starts in the middle of a line.
    """
    if not prefix:
        return data
    begun = before not in (b"\n", b"\r") or (before == b"\r" and data.startswith(b"\n"))
    whole = data.splitlines(keepends=True)
    return b"".join((b"" if begun and not i else prefix) + line for i, line in enumerate(whole))
