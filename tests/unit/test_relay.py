"""What `flockstep launch` does with the output of scripts: all of it comes out, and nobody waits for it for ever."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from flockstep.launchers import children
from flockstep.launchers.children import Script, relay

PATIENCE = 20.0


@pytest.fixture
def pipes() -> Iterator[tuple[IO[bytes], IO[bytes], IO[Any], IO[bytes]]]:
    """Where a script writes, where the relay reads, where the relay writes, and who reads that."""
    (read, write), (shown, sink) = os.pipe(), os.pipe()
    with os.fdopen(write, "wb", 0) as script, os.fdopen(read, "rb", 0) as source:
        with os.fdopen(sink, "wb", 0) as out, os.fdopen(shown, "rb", 0) as reader:
            yield script, source, out, reader


def in_background(target: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread


def test_whole_lines_and_the_rest_at_the_end(pipes: Any) -> None:
    script, source, out, reader = pipes
    script.write(b"one\ntwo\nthr")
    thread = in_background(relay, source, out)
    assert reader.read(100) == b"one\ntwo\n"
    script.write(b"ee\xff\x00\nlast")
    script.close()
    thread.join(PATIENCE)
    assert reader.read(100) == b"three\xff\x00\nlast"


def test_a_line_without_an_end_does_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "long").write_bytes(b"y" * (3 * children.LONGEST_LINE) + b"\n")
    pieces: list[bytes] = []
    monkeypatch.setattr(children, "_write", lambda out, data: pieces.append(bytes(data)))
    with (tmp_path / "out").open("w") as out:
        relay((tmp_path / "long").open("rb", 0), out)
    assert max(map(len, pieces)) <= children.LONGEST_LINE
    assert b"".join(pieces) == (tmp_path / "long").read_bytes()


def test_a_script_does_not_wait_for_a_reader_that_is_gone(pipes: Any) -> None:
    script, source, out, reader = pipes
    reader.close()

    def write() -> None:
        for _ in range(100):
            script.write(b"x" * 9_999 + b"\n")
        script.close()

    writer = in_background(write)
    relay(source, out)
    writer.join(PATIENCE)
    assert not writer.is_alive()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_what_a_script_started_does_not_hold_up_the_news_of_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(children, "DRAIN", 3600.0)
    os.mkfifo(tmp_path / "end")
    script = Script(["sh", "-c", f"(read line < {tmp_path / 'end'}; echo late) & exit 3"], dict(os.environ))
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
    script, source, out, reader = pipes
    thread = in_background(relay, source, out, b"[rank 1] ")
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
    script, source, out, reader = pipes
    thread = in_background(relay, source, out, b"[rank 1] ")
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


@pytest.mark.parametrize("code", [0, 3, -9])
def test_a_muted_script_is_heard_only_if_it_fails(code: int, capfd: pytest.CaptureFixture[str]) -> None:
    words = f"import os, sys; print('out'); sys.stderr.write('x' * {children.LAST_WORDS} + 'err'); "
    words += f"sys.exit({code})" if code >= 0 else f"os.kill(os.getpid(), {-code})"
    script = Script([sys.executable, "-c", words], dict(os.environ), "[rank 2] ", muted=True)
    while script.exit_code() is None:
        pass
    script.drain(time.monotonic() + PATIENCE)
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err == ("[rank 2] " + "x" * (children.LAST_WORDS - 3) + "err" if code else "")
