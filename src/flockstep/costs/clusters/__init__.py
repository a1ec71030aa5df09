"""The built-in clusters, one TOML file each."""

from __future__ import annotations

import pathlib

FOLDER = pathlib.Path(__file__).parent
"""Path of the folder with the built-in cluster descriptions."""


def names() -> list[str]:
    """Return the names of the built-in clusters."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))
