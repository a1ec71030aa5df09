"""Self-contained HTML pages, with styles, scripts and data included, so that a page works without a network."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from flockstep.records.access import write_whole
from flockstep.report.style import Figure
from flockstep.report.terminal import TextTable

PLOTLY = Path(__file__).parent / "assets" / "plotly-cartesian.min.js.gz"
"""The cartesian bundle of plotly.js 4.1.1, as published on npm, compressed with gzip; every page contains it."""


@dataclass(frozen=True)
class Drawing:
    """A plot with a heading and a caption that explains its axes and symbols."""

    name: str
    """Identifier of the plot within the HTML page."""
    heading: str
    caption: str
    figure: Figure


@dataclass(frozen=True)
class Page:
    """A page of sentences, lists, plots and tables, from top to bottom."""

    brand: str
    title: str
    footer: str
    sentences: Sequence[str] = ()
    lists: Sequence[tuple[str, Sequence[str]]] = ()
    """Lists on the page, as pairs of a heading and the entries of the list."""
    drawings: Sequence[Drawing] = field(default=())
    tables: Sequence[TextTable] = ()

    def render(self) -> str:
        """Return the text of the HTML page."""
        return filled("page.html.j2", page=self)

    def write(self, path: Path | str) -> Path:
        """Write the page to `path`, whose folder is created if it is missing, and return the path."""
        return write(self.render(), path)


def filled(template: str, **values: Any) -> str:
    """Fill in a template of this folder; values are escaped, and a missing value raises an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    plotly = base64.b64encode(PLOTLY.read_bytes()).decode()
    return environment.get_template(template).render(json=_script_safe, plotly=plotly, **values)


def write(page: str, path: Path | str) -> Path:
    """Write a page to `path`, whose folder is created if it is missing, and return the path."""
    path = Path(path)
    write_whole(path, page.encode())
    return path


def _script_safe(value: Any) -> str:
    """Encode a value as JSON that is safe inside a script element; numbers that are not finite become null."""
    text = msgspec.json.encode(value).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
