"""Runs the tutorials and some how-tos: writes their files, runs their commands, and compares what those print.

A page is run from its top in an empty folder:

    ```python title="job.py"     a file
    ```console                   commands; each line begins with "$ "
    ```text                      what the commands above it print; "…" on a line stands for lines that are left out
    ```text title="exit code 2"  the same, of a command that fails

    python docs/tutorials.py [PAGE ...]      run pages, all by default, and rewrite what their commands print
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
HOW_TOS = ("own-machines.md", "resume.md", "sealed.md")
PAGES = [*sorted((ROOT / "docs" / "tutorials").glob("*.md")), *(ROOT / "docs" / "how-to" / name for name in HOW_TOS)]
LEFT_OUT = "…"
TIMED = ("launch", "train")
"""Commands that measure time: their figures are not compared, nor those of a `compare` of real processes."""
_BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]*)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_EXIT = re.compile(r"exit code (\d+)")


class Block(NamedTuple):
    """A fenced block of a page, and where its body begins and ends."""

    language: str
    title: str
    body: str
    start: int
    stop: int


class Output(NamedTuple):
    """What the commands before a `text` block printed, and whether the block says so."""

    block: Block
    printed: str
    timed: bool

    @property
    def agrees(self) -> bool:
        """Whether the page shows what was printed; of commands that measure time, all but the figures."""
        shown, printed = self.block.body, self.shortened
        return shown == printed or (self.timed and _words(shown) == _words(printed))

    @property
    def shortened(self) -> str:
        """What was printed, without the lines that the page leaves out."""
        shown, lines = self.block.body.splitlines(), self.printed.splitlines()
        if LEFT_OUT not in shown:
            return self.printed
        before = shown.index(LEFT_OUT)
        after = len(shown) - before - 1
        return "".join(f"{line}\n" for line in [*lines[:before], LEFT_OUT, *lines[len(lines) - after :]])


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    for found in _BLOCK.finditer(text):
        yield Block(found[1], found[2] or "", found[3], found.start(3), found.end(3))


def commands(block: Block) -> list[list[str]]:
    """The commands of a `console` block, as words."""
    lines = block.body.replace("\\\n", " ").splitlines()
    assert all(line.startswith("$ ") for line in lines), f"a console block holds commands alone, got {block.body!r}"
    return [shlex.split(line.removeprefix("$ ")) for line in lines]


def write_files(text: str, folder: Path) -> None:
    """Write the files that a page shows into a folder."""
    for block in blocks(text):
        if block.language == "python":
            assert block.title, f"a tutorial's program has a file's name as its title, got none for {block.body!r}"
            (folder / block.title).write_text(block.body, "utf-8")


def run(text: str, folder: Path) -> Iterator[Output]:
    """Run a page's commands in a folder that holds its files, and yield what is printed where the page shows it.

    Raises:
        AssertionError: a command ended with another exit code than the page says.
    """
    found = list(blocks(text))
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block.language != "console":
            continue
        printed, timed = "", False
        expected = _EXIT.search(after.title) if after is not None and after.language == "text" else None
        for words in commands(block):
            done = subprocess.run(  # noqa: S603
                words, cwd=folder, env=_environment(), capture_output=True, text=True, check=False
            )
            wanted = int(expected[1]) if expected else 0
            assert done.returncode == wanted, f"{shlex.join(words)} ended with {done.returncode}: {done.stderr}"
            printed += done.stdout + (_last_line(done.stderr) if wanted else "")
            timed = timed or words[1] in TIMED or (words[1] == "compare" and "--simulate" not in words)
        if after is not None and after.language == "text":
            yield Output(after, _tidy(printed), timed)


def _environment() -> dict[str, str]:
    programs = str(Path(sys.executable).parent)
    own = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "112"}
    return {**os.environ, **own, "OMP_NUM_THREADS": "1"}


def _last_line(text: str) -> str:
    return f"{text.strip().splitlines()[-1]}\n" if text.strip() else ""


def _tidy(text: str) -> str:
    """`text` without spaces at the ends of lines, and without empty lines at its end."""
    return "".join(f"{line.rstrip()}\n" for line in text.strip("\n").splitlines())


def _words(text: str) -> list[str]:
    """The words of `text` in alphabetical order: without figures, and however wide figures wrap a table's heading."""
    return sorted(re.findall(r"[^\W\d_]+", text))


def rewritten(text: str) -> str:
    """The page with what its commands print now."""
    with tempfile.TemporaryDirectory() as folder:
        write_files(text, Path(folder))
        outputs = list(run(text, Path(folder)))
    for output in reversed(outputs):
        if not output.agrees:
            text = text[: output.block.start] + output.shortened + text[output.block.stop :]
    return text


def main() -> None:
    """Rewrite the pages that the command names, or all."""
    for path in [Path(name) for name in sys.argv[1:]] or PAGES:
        before = path.read_text("utf-8")
        after = rewritten(before)
        path.write_text(after, "utf-8")
        sys.stdout.write(f"{path.name}: {'as it was' if after == before else 'rewritten'}\n")


if __name__ == "__main__":
    main()
