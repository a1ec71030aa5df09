"""The built-in clusters, one TOML file each."""

from __future__ import annotations

import pathlib

FOLDER = pathlib.Path(__file__).parent
"""Folder of the built-in descriptions."""


def names() -> list[str]:
    """Names of the built-in clusters."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))
