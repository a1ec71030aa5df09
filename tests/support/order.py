"""In which order processes that run tests side by side take their files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

WAITING = ("end_to_end", "faults", "security", "third_party")
"""Folders whose tests wait for processes of their own."""


def mixed(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The tests, file by file: from first to last some of those that wait beside some of those that compute.

    Of both kinds the files with most tests come first, so that the last files are short.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    longest = sorted(files, key=lambda file: -len(files[file]))
    kinds = [[file for file in longest if (file.parent.name in WAITING) == waits] for waits in (True, False)]
    places = {file: (number + 0.5) / len(kind) for kind in kinds for number, file in enumerate(kind)}
    return [item for file in sorted(places, key=places.__getitem__) for item in files[file]]
