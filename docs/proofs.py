"""Which tests prove what: read from the marks `oracle` and `negative_control` on the tests, for `generate.py`."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from flockstep import registry

ROOT = Path(__file__).parents[1]
PROVED = (
    "strategy",
    "consistency",
    "server_update",
    "aggregation",
    "filter",
    "client_sampling",
    "drift",
    "privacy",
    "outer_optimizer",
    "synchronization_schedule",
    "collective",
    "codec",
    "feedback",
    "topology",
    "optimizer",
    "schedule",
    "pipeline_schedule",
)
"""The kinds of component that are algorithms, in the order of the table."""
MARKS = ("oracle", "negative_control")
Proofs = dict[str, dict[str, list[str]]]
"""Component, as "noun:name" → mark → tests, as "folder/file.py::test"."""


def proofs(root: Path = ROOT) -> Proofs:
    """Every marked test, by what it proves."""
    found: Proofs = defaultdict(lambda: {mark: [] for mark in MARKS})
    for path in sorted((root / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        for test in tree.body:
            if isinstance(test, ast.FunctionDef):
                for mark, name in _marks(test):
                    found[name][mark].append(f"{path.relative_to(root / 'tests')}::{test.name}")
    return dict(found)


def rows(root: Path = ROOT) -> list[tuple[str, str, str, str]]:
    """(noun, name, tests against an oracle, negative controls) for every algorithm in the registry."""
    known = proofs(root)
    nothing: dict[str, list[str]] = {mark: [] for mark in MARKS}
    return [
        (noun, name, *(linked(known.get(f"{noun}:{name}", nothing)[mark]) for mark in MARKS))
        for noun in PROVED
        for name in (registry.names(noun) if noun in registry.nouns() else [])
    ]


def unknown(root: Path = ROOT) -> list[str]:
    """Names in marks that nothing in the registry has."""
    return [
        name
        for name in proofs(root)
        if name.partition(":")[0] not in registry.nouns()
        or name.partition(":")[2] not in registry.names(name.partition(":")[0])
    ]


def _marks(test: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    for decorator in test.decorator_list:
        if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Attribute):
            mark = decorator.func.attr
            if mark in MARKS:
                yield from ((mark, str(ast.literal_eval(argument))) for argument in decorator.args)


def linked(tests: Sequence[str]) -> str:
    """Links to the files, with the tests' names."""
    lines = []
    for test in tests:
        path, _, name = test.partition("::")
        lines.append(f"[{name.removeprefix('test_').replace('_', ' ')}](../../tests/{path})")
    return "<br>".join(lines)
