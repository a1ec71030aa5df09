"""Every fault of the table in docs/explanation/failures.md names tests that exist."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from support.site import program

SCENARIOS = program("scenarios")
ALL = SCENARIOS.scenarios()


def test_each_scenario_names_tests_that_exist() -> None:
    assert SCENARIOS.unknown_tests(ALL) == []
    assert len({scenario.fault for scenario in ALL}) == 30
    assert [scenario.fault for scenario in ALL if not scenario.tests] == []


def test_figures_are_of_faults_in_the_table() -> None:
    figures = json.loads(SCENARIOS.FIGURES.read_text("utf-8"))
    assert set(figures) <= {scenario.fault for scenario in ALL}


@dataclass
class One:
    tests: tuple[str, ...]


def test_a_test_that_does_not_exist_is_found(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text("def test_one():\n    pass\n\n\ndef helper():\n    pass\n", "utf-8")
    missing = ["test_it.py::test_two", "test_it.py::helper", "test_other.py::test_one"]
    assert SCENARIOS.unknown_tests([One(("test_it.py::test_one", *missing))], tmp_path) == missing
