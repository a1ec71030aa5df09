"""Draws docstrings and messages of flockstep at random, to read them without their surroundings.

    python tools/sample_texts.py --docstrings 60 --messages 60 --seed 1

A docstring belongs to a public module, class, function, method, constant or field. A message is any other string of at
least four words: an error, a warning, a help text, a sentence of a report; a program in Python is not. Fields of
f-strings are printed as {…}.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[1] / "src"
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
WORDS = 4
"""Number of words from which a string counts as a message."""
PROGRAM = re.compile(r"\s*(import|from [\w.]+ import) [\w{]")
"""Beginning of a program in Python, which is not a message."""


class Text(NamedTuple):
    """A text of the source, with the place where a reader finds it."""

    file: Path
    line: int
    name: str
    words: str


def docstrings(file: Path) -> Iterator[Text]:
    """The docstrings of everything in `file` whose name does not begin with an underscore."""
    for owner, node in _public(file.stem, ast.parse(file.read_text("utf-8"))):
        if text := ast.get_docstring(node):
            yield Text(file, node.body[0].lineno, owner, text)
        if not isinstance(node, ast.Module | ast.ClassDef):
            continue
        for before, after in itertools.pairwise(node.body):
            said = after.value if isinstance(after, ast.Expr) else None
            if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(said, ast.Constant):
                target = before.targets[0] if isinstance(before, ast.Assign) else before.target
                if isinstance(said.value, str) and not ast.unparse(target).startswith("_"):
                    yield Text(file, after.lineno, f"{owner}.{ast.unparse(target)}", said.value)


def _public(name: str, node: DOCUMENTED) -> Iterator[tuple[str, DOCUMENTED]]:
    yield name, node
    if isinstance(node, ast.Module | ast.ClassDef):
        for part in node.body:
            if isinstance(part, DOCUMENTED) and not isinstance(part, ast.Module) and not part.name.startswith("_"):
                yield from _public(f"{name}.{part.name}", part)


def messages(file: Path) -> Iterator[Text]:
    """The strings of at least four words in `file` that are no docstrings."""
    found: list[tuple[ast.AST, str]] = [(ast.parse(file.read_text("utf-8")), file.stem)]
    while found:
        node, owner = found.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        owner = getattr(node, "name", None) or owner
        text = _written(node)
        if text is None:
            found += [(part, owner) for part in ast.iter_child_nodes(node)]
        elif sum(any(map(str.isalpha, word)) for word in text.split()) >= WORDS and not PROGRAM.match(text):
            yield Text(file, getattr(node, "lineno", 0), owner, text)


def _written(node: ast.AST) -> str | None:
    """The text of a string; None for any other node."""
    if isinstance(node, ast.JoinedStr):
        fields = (str(part.value) if isinstance(part, ast.Constant) else "{…}" for part in node.values)
        return "".join(fields)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def drawn(texts: list[Text], number: int, seed: int) -> list[Text]:
    """At most `number` of `texts`, drawn by `seed` without replacement, in their order in the source."""
    chosen = random.Random(seed).sample(range(len(texts)), min(number, len(texts)))  # noqa: S311
    return [texts[index] for index in sorted(chosen)]


def main() -> None:
    """Print what was drawn."""
    parser = argparse.ArgumentParser(description="Draw docstrings and messages at random.")
    parser.add_argument("--docstrings", type=int, default=60, help="number of docstrings to draw")
    parser.add_argument("--messages", type=int, default=60, help="number of messages to draw")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random draw")
    parser.add_argument("--root", type=Path, default=SOURCE, help="folder whose Python files are read")
    given = parser.parse_args()
    files = sorted(given.root.rglob("*.py"))
    for what, number in ((docstrings, given.docstrings), (messages, given.messages)):
        texts = [text for file in files for text in what(file)]
        print(f"\n{what.__name__}: {min(number, len(texts))} of {len(texts)}")
        for text in drawn(texts, number, given.seed):
            print(f"\n{text.file.relative_to(given.root)}:{text.line}: {text.name}\n    {' '.join(text.words.split())}")


if __name__ == "__main__":
    main()
