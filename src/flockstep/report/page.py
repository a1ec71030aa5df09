"""One self-contained HTML page of sentences, plots and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flockstep.report.html import environment, plotly_source, script_safe
from flockstep.report.style import Figure


@dataclass(frozen=True)
class Drawing:
    """A plot with a heading, and a caption that says what its axes and signs are."""

    name: str
    """Its place in the page."""
    heading: str
    caption: str
    figure: Figure


@dataclass(frozen=True)
class Listing:
    """A table."""

    heading: str
    note: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    styles: Mapping[int, str] = field(default_factory=dict)
    """Of rows that stand out, by number: chosen, split or total, as the template has them."""
    left: Sequence[int] = (0,)
    """Columns that are words, not figures."""


@dataclass(frozen=True)
class Page:
    """What stands on it, from top to bottom."""

    brand: str
    title: str
    footer: str
    sentences: Sequence[str] = ()
    lists: Sequence[tuple[str, Sequence[str]]] = ()
    """Headings, each with what stands below."""
    drawings: Sequence[Drawing] = field(default=())
    listings: Sequence[Listing] = ()

    def render(self) -> str:
        """The page as text."""
        return environment().get_template("page.html.j2").render(page=self, json=script_safe, plotly=plotly_source())

    def write(self, path: Path | str) -> Path:
        """Write it to `path` and return that; the folder is made if need be."""
        path = Path(path)
        text = self.render()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path
