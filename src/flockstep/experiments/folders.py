"""Default names of the folders in which runs and comparisons are recorded."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path


def folder(out: Path | str | None, what: str) -> Path:
    """Return the folder for a record: `out`, or a new one in runs/, named by the time and by `what`."""
    if out is not None:
        return Path(out)
    return Path("runs") / f"{datetime.now().astimezone():%Y%m%d-%H%M%S-%f}-{slug(what)}"


def slug(text: str) -> str:
    """Return a text as a file name of at most 60 letters, digits and hyphens."""
    kept = "".join(c if c.isalnum() else "-" for c in text)
    return "-".join(part for part in kept.split("-") if part)[:60]
