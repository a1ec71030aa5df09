"""What every test is held to: it can fail, and it names the error that it expects by what the error says."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ASSERTING = re.compile(r"assert|check|expect|require|each|raises$|warns$")
"""How the names of functions begin that assert for a test and stand in another file."""
SPEECHLESS = re.compile(r"\bBlockingIOError\b")
"""An error whose class says all: a socket that has nothing to read, or no room."""
WEAK = re.compile(r"\w+|.* is not None|(?!not ).*\.(exists|is_file|is_dir)\(\)")
"""What holds of nearly everything: not enough, where a test asserts nothing else."""


@dataclass
class Facts:
    """What stands in a function: its assertions, whether it raises, what it calls, and lines that expect any error."""

    asserted: list[ast.expr] = field(default_factory=list)
    raises: bool = False
    called: set[str] = field(default_factory=set)
    unmatched: list[int] = field(default_factory=list)


def facts(function: ast.AST) -> Facts:
    found = Facts()
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            found.asserted.append(node.test)
        elif isinstance(node, ast.Raise):
            found.raises = True
        elif isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            found.called.add(name)
            speechless = name == "raises" and SPEECHLESS.search(ast.unparse(node.args[0])) is not None
            if name == "raises" and not speechless and not any(keyword.arg == "match" for keyword in node.keywords):
                found.unmatched.append(node.lineno)
    return found


def asserts(name: str, of: dict[str, Facts], seen: frozenset[str] = frozenset()) -> bool:
    """Whether a function of a file, or one that it calls there, can fail by what it finds."""
    if name not in of or name in seen:
        return ASSERTING.match(name.lstrip("_")) is not None
    return bool(of[name].asserted) or of[name].raises or any(asserts(one, of, seen | {name}) for one in of[name].called)


def weaknesses(source: str) -> list[str]:
    """The tests of a file that cannot fail, or hardly, and the lines where any error of a kind would do."""
    tree = ast.parse(source)
    of = {node.name: facts(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    found = [f"line {line}: raises without match" for line in {line for one in of.values() for line in one.unmatched}]
    for name, test in of.items():
        if name.startswith("test_") and not asserts(name, of):
            found.append(f"{name} asserts nothing")
        elif name.startswith("test_") and test.asserted and not any(asserts(one, of) for one in test.called):
            own = [ast.unparse(one) for one in test.asserted]
            if all(map(WEAK.fullmatch, own)):
                found.append(f"{name} asserts only {', '.join(own)}")
    return found


def test_every_test_can_fail() -> None:
    files = sorted(TESTS.rglob("test_*.py"))
    assert Path(__file__) in files
    assert {str(file): found for file in files if (found := weaknesses(file.read_text("utf-8")))} == {}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("with pytest.raises(ValueError): f()\n    assert f(2) == 3", "line 2: raises without match"),
        ("f()", "test_x asserts nothing"),
        ("helps()", "test_x asserts nothing"),
        ("assert f() is not None", "test_x asserts only f() is not None"),
        ("assert (folder / 'report.html').exists()", "test_x asserts only (folder / 'report.html').exists()"),
        ("assert found", "test_x asserts only found"),
    ],
)
def test_one_that_cannot_is_found(body: str, said: str) -> None:
    assert weaknesses(f"def test_x():\n    {body}\ndef helps():\n    f()\n") == [said]


@pytest.mark.parametrize(
    "body",
    [
        "assert not (folder / 'report.html').exists()",
        "assert f() is not None\n    assert f() == 3",
        "helps()",
        "with pytest.raises(ValueError, match='f'): f()",
        "check_strategy(f())",
    ],
)
def test_one_that_can_is_not(body: str) -> None:
    assert weaknesses(f"def test_x():\n    {body}\ndef helps():\n    assert f() == 3\n") == []
