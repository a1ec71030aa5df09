"""tools/sample_texts.py: which strings count as docstrings and as messages, and that a seed repeats its draw."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = '''"""Doors."""
WIDTH = 2.0
"""Width of a door in meters."""
_LATCH = 1
"""A private constant."""


class Door:
    """A door between two rooms."""

    height: float = 2.1
    """Height in meters."""

    def open(self, degrees: int) -> None:
        """Open the door."""
        if degrees > 90:
            raise ValueError(f"degrees must be <= 90, got {degrees}; the wall is there")
        print("two words")
        exec("import math; print(math.pi, math.e, math.tau)")

    def _creak(self) -> None:
        """A private method."""
'''


def drawn(*words: str) -> str:
    command = [sys.executable, str(ROOT / "tools" / "sample_texts.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_docstrings_of_public_things_and_strings_of_four_words_are_found(tmp_path: Path) -> None:
    (tmp_path / "door.py").write_text(SOURCE)
    lines = drawn("--root", str(tmp_path)).splitlines()
    assert [line.strip() for line in lines if line.startswith("    ")] == [
        "Doors.",
        "Width of a door in meters.",
        "A door between two rooms.",
        "Height in meters.",
        "Open the door.",
        "degrees must be <= 90, got {…}; the wall is there",
    ]
    assert "door.py:3: door.WIDTH" in lines
    assert "door.py:17: open" in lines
    assert "docstrings: 5 of 5" in lines


def test_a_seed_repeats_its_draw_and_another_seed_draws_others() -> None:
    words = ["--root", str(ROOT / "src" / "flockstep" / "launchers"), "--docstrings", "3", "--messages", "3", "--seed"]
    assert drawn(*words, "1") == drawn(*words, "1") != drawn(*words, "2")
