"""Formats results as text, for `print` and for notebook cells."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence

from rich.console import Console

from flockstep.records.summary import Summary
from flockstep.report.table import table

WIDTH = 100


def ranked_text(summaries: Sequence[Summary], seeds: int = 1) -> str:
    """Return the ranked table of runs as text without colors. Each row is the median of `seeds` runs."""
    return printed(table(summaries, seeds))


def ranked_html(summaries: Sequence[Summary], seeds: int, sentences: Sequence[str]) -> str:
    """Return the ranked table of runs as HTML for a notebook, with sentences below it; every text is escaped."""
    return table(summaries, seeds).to_html() + "".join(f"<div>{html.escape(text)}</div>" for text in sentences)


def printed(*what: object) -> str:
    """Return the text that the library rich prints for an object, in lines of at most 100 characters."""
    text = io.StringIO()
    Console(file=text, width=WIDTH, color_system=None, highlight=False).print(*what, sep="\n")
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
