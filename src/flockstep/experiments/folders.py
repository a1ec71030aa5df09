"""Where records are put when nobody says."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path


def folder(out: Path | str | None, what: str) -> Path:
    """The folder for a record: `out`, otherwise a new folder in runs/ that is named after the time and `what`."""
    if out is not None:
        return Path(out)
    return Path("runs") / f"{datetime.now().astimezone():%Y%m%d-%H%M%S-%f}-{slug(what)}"


def slug(text: str) -> str:
    """A file name made of `text`: letters, digits and hyphens, at most 60."""
    kept = "".join(c if c.isalnum() else "-" for c in text)
    return "-".join(part for part in kept.split("-") if part)[:60]
