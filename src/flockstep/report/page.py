"""Self-contained HTML pages: everything inlined, nothing loaded, readable without a network."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import msgspec

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
    """A page of sentences, plots and tables: what stands on it, from top to bottom."""

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
        return filled("page.html.j2", page=self)

    def write(self, path: Path | str) -> Path:
        """Write it to `path` and return that; the folder is made if need be."""
        return write(self.render(), path)


def filled(template: str, **values: Any) -> str:
    """A template of this folder with these values; what users write is escaped, what is not given is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(json=_script_safe, plotly=_plotly(), **values)


def write(page: str, path: Path | str) -> Path:
    """Write a page to `path` and return that; the folder is made if need be."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


@functools.cache
def _plotly() -> str:
    """The script that every page carries."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _script_safe(value: Any) -> str:
    """JSON that cannot end the script element it stands in; what is not finite becomes null."""
    text = msgspec.json.encode(value).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
