"""Which tests hold which fault, and what was measured: read from fault_scenarios.toml and benchmarks/faults.json, for
`generate.py`.
"""

from __future__ import annotations

import ast
import json
import tomllib
from pathlib import Path

import msgspec
import proofs

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_name("fault_scenarios.toml")
FIGURES = ROOT / "benchmarks" / "faults.json"
"""What `benchmarks/faults.py` has measured, by fault."""


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault that a run should survive."""

    fault: str
    behavior: str
    tests: tuple[str, ...]
    """The tests, as "folder/file.py::test"."""
    bound: str = "–"
    measured: str = "not measured"
    missing: str = ""
    """What does not work yet, or has no test."""

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of the scenario's row."""
        not_yet = f" **Not yet:** {self.missing}" if self.missing else ""
        return self.fault, self.behavior + not_yet, self.bound, self.measured, proofs.linked(self.tests)


def scenarios(file: Path = FILE) -> list[Scenario]:
    """All scenarios, in the order of the table."""
    found = msgspec.convert(tomllib.loads(file.read_text("utf-8"))["scenario"], list[Scenario])
    figures: dict[str, str] = json.loads(FIGURES.read_text("utf-8"))
    return [msgspec.structs.replace(one, measured=figures.get(one.fault, one.measured)) for one in found]


def unknown_tests(found: list[Scenario], root: Path = ROOT) -> list[str]:
    """The tests of the scenarios that do not exist."""
    return [test for scenario in found for test in scenario.tests if not _exists(test, root)]


def _exists(test: str, root: Path) -> bool:
    path, _, name = test.partition("::")
    file = root / "tests" / path
    if not file.is_file():
        return False
    body = ast.parse(file.read_text("utf-8")).body
    return name.startswith("test_") and any(isinstance(one, ast.FunctionDef) and one.name == name for one in body)
