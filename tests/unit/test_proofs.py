"""Every algorithm has a test against an oracle and one that breaks it on purpose."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from flockstep import registry

ROOT = Path(__file__).parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_proofs", ROOT / "docs" / "proofs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PROOFS = load()
ROWS = PROOFS.rows()


def test_no_row_is_empty() -> None:
    missing = [
        f"{mark}({noun + ':' + name!r})"
        for noun, name, *tests in ROWS
        for mark, found in zip(PROOFS.MARKS, tests, strict=True)
        if not found
    ]
    assert missing == [], "no test is marked so"


def test_every_mark_names_something() -> None:
    assert PROOFS.unknown() == []


def test_every_algorithm_has_a_row() -> None:
    assert {noun for noun, *_ in ROWS} == set(PROOFS.PROVED) & set(registry.nouns())
    assert len(ROWS) == sum(len(registry.names(noun)) for noun in PROOFS.PROVED if noun in registry.nouns())


def test_a_missing_mark_leaves_an_empty_row(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    text = '@pytest.mark.oracle("strategy:ps")\ndef test_one():\n    pass\n'
    (tmp_path / "tests" / "test_it.py").write_text(text, "utf-8")
    rows = {(noun, name): (oracles, controls) for noun, name, oracles, controls in PROOFS.rows(tmp_path)}
    assert rows["strategy", "ps"] == ("[one](../../tests/test_it.py)", "")
    assert rows["strategy", "all_reduce"] == ("", "")
