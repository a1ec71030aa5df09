"""What `flockstep launch` does with the output of scripts: all of it comes out, and nobody waits for it for ever."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from flockstep.errors import ConfigurationError
from flockstep.launchers import children, output
from flockstep.launchers.children import Script, begun, relay
from flockstep.launchers.output import LAST_WORDS, OUT, SHOWN, Output, RankOutput
from support.disks import small_disk

PATIENCE = 20.0


@pytest.fixture
def pipes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[IO[bytes], IO[bytes], IO[bytes]]]:
    """Where a script writes, where the relay reads, and who reads what is shown."""
    (read, write), (shown, sink) = os.pipe(), os.pipe()
    with os.fdopen(write, "wb", 0) as script, os.fdopen(read, "rb", 0) as source:
        with os.fdopen(sink, "wb", 0) as out, os.fdopen(shown, "rb", 0) as reader:
            monkeypatch.setattr(output, "sys", SimpleNamespace(stdout=out))
            yield script, source, reader


def in_background(target: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread


def test_whole_lines_and_the_rest_at_the_end(pipes: Any) -> None:
    script, source, reader = pipes
    script.write(b"one\ntwo\nthr")
    thread = in_background(relay, source, OUT, RankOutput(1, SHOWN))
    assert reader.read(100) == b"one\ntwo\n"
    script.write(b"ee\xff\x00\nlast")
    script.close()
    thread.join(PATIENCE)
    assert reader.read(100) == b"three\xff\x00\nlast"


def test_a_line_without_an_end_does_not_pile_up(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(b"y" * (3 * children.LONGEST_LINE) + b"\n")
    pieces: list[bytes] = []
    relay((tmp_path / "long").open("rb", 0), OUT, lambda stream, data: pieces.append(data))
    assert max(map(len, pieces)) <= children.LONGEST_LINE
    assert b"".join(pieces) == (tmp_path / "long").read_bytes()


def test_a_script_does_not_wait_for_a_reader_that_is_gone(pipes: Any) -> None:
    script, source, reader = pipes
    reader.close()

    def write() -> None:
        for _ in range(100):
            script.write(b"x" * 9_999 + b"\n")
        script.close()

    writer = in_background(write)
    relay(source, OUT, SHOWN.show)
    writer.join(PATIENCE)
    assert not writer.is_alive()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_what_a_script_started_does_not_hold_up_the_news_of_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(children, "DRAIN", 3600.0)
    os.mkfifo(tmp_path / "end")
    command = ["sh", "-c", f"(read line < {tmp_path / 'end'}; echo late) & exit 3"]
    process = begun(command, dict(os.environ))
    script = Script(process, (process.stdout, process.stderr), SHOWN.show)
    codes: list[int | None] = []

    def wait() -> None:
        while (code := script.exit_code()) is None:
            pass
        codes.append(code)

    in_background(wait).join(PATIENCE)
    (tmp_path / "end").write_text("now\n")
    assert codes == [3]
    script.drain(time.monotonic() + PATIENCE)
    assert capfd.readouterr().out == "late\n"


def test_each_line_begins_with_the_prefix_and_a_long_one_but_once(pipes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "LONGEST_LINE", 5)
    script, source, reader = pipes
    thread = in_background(relay, source, OUT, RankOutput(1, Output(prefix=True)))
    script.write(b"one\ntwo\r\n\n10 %\r20 %\r")
    assert reader.read(100) == b"[rank 1] one\n[rank 1] two\r\n[rank 1] \n[rank 1] 10 %\r[rank 1] 20 %\r"
    script.write(b"without an end")
    assert reader.read(100) == b"[rank 1] without an end"
    script.write(b" yet\n")
    assert reader.read(100) == b" yet\n"
    script.write(b"last")
    script.close()
    thread.join(PATIENCE)
    assert reader.read(100) == b"[rank 1] last"


def test_a_line_end_that_comes_in_two_pieces_is_one(pipes: Any) -> None:
    script, source, reader = pipes
    thread = in_background(relay, source, OUT, RankOutput(1, Output(prefix=True)))
    script.write(b"one\r")
    assert reader.read(100) == b"[rank 1] one\r"
    script.write(b"\ntwo\r")
    assert reader.read(100) == b"\n[rank 1] two\r"
    script.write(b"three\n")
    assert reader.read(100) == b"[rank 1] three\n"
    script.write(b"\n")
    assert reader.read(100) == b"[rank 1] \n"
    script.close()
    thread.join(PATIENCE)


@pytest.mark.parametrize("ranks", ["none", "rank0"])
@pytest.mark.parametrize("code", [0, 3, -9])
def test_a_hidden_script_is_heard_only_if_it_fails(
    code: int, ranks: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = "import os, sys; print('out', flush=True); "
    words += f"print('x' * {LAST_WORDS} + 'err', end='', file=sys.stderr, flush=True); "
    words += f"sys.exit({code})" if code >= 0 else f"os.kill(os.getpid(), {-code})"
    sink = Output(ranks, prefix=True, folder=tmp_path).sinks(range(2, 3), 3)[2]
    process = begun([sys.executable, "-c", words], dict(os.environ))
    script = Script(process, (process.stdout, process.stderr), sink)
    while script.exit_code() is None:
        pass
    script.drain(time.monotonic() + PATIENCE)
    sink.close(failed=code != 0)
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err == ("[rank 2] " + "x" * (LAST_WORDS - 3) + "err" if code else "")
    assert (tmp_path / "rank-2.out").read_text() == "out\n"
    assert (tmp_path / "rank-2.err").read_text() == "x" * LAST_WORDS + "err"


def test_files_of_an_earlier_run_are_kept_unless_they_may_go(tmp_path: Path) -> None:
    """Two hosts of a run may share the folder: each cares for its own ranks, and for those that are none any more."""
    folder = tmp_path / "new" / "out"
    write(Output(folder=folder), range(4), 4, b"earlier\n")
    (folder / "notes.txt").write_text("mine")
    again = Output(folder=folder)
    with pytest.raises(
        ConfigurationError, match=r"holds the output of an earlier run, such as rank-0\.err; choose .*--overwrite"
    ):
        again.require_folder(range(1), 3, overwrite=False)
    assert (folder / "rank-1.out").read_text() == "earlier\n"
    again.require_folder(range(1), 3, overwrite=True)
    write(again, range(1), 3, b"later\n")
    names = {f"rank-{rank}.{name}" for rank in range(3) for name in ("out", "err")}
    assert {file.name for file in folder.iterdir()} == {*names, "notes.txt"}
    assert [(folder / f"rank-{rank}.out").read_text() for rank in range(2)] == ["later\n", "earlier\n"]
    (folder / "rank-2.out").unlink()
    (folder / "rank-2.err").unlink()
    again.require_folder(range(2, 3), 3, overwrite=False)


def write(output: Output, ranks: range, workers: int, data: bytes) -> None:
    """Write what each rank says."""
    for sink in output.sinks(ranks, workers).values():
        sink(OUT, data)
        sink.close(failed=False)


def test_a_folder_that_is_none_or_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="file is a file, not a folder"):
        Output(folder=tmp_path / "file").require_folder(range(1), 1, overwrite=False)
    with pytest.raises(ConfigurationError, match=r"file/in could not be written: Not a directory; choose another"):
        Output(folder=tmp_path / "file" / "in").sinks(range(1), 1)
    Output(folder=tmp_path / "absent").require_folder(range(1), 1, overwrite=False)


def test_where_the_disk_is_full_the_script_continues_and_is_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "small") as disk:
        sink = Output(folder=disk).sinks(range(1), 1)[0]
        line = b"x" * 99 + b"\n"
        for _ in range(10_000):
            sink(OUT, line)
        sink.close(failed=False)
        assert (disk / "rank-0.out").read_bytes().startswith(line)
    said = capfd.readouterr()
    assert said.out == line.decode() * 10_000
    assert said.err.count("rank-0.out could not be written: No space left on device; later output is missing") == 1
