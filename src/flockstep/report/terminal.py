"""The tables of reports, for a terminal of any width, for notebooks and for HTML pages."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from flockstep.errors import printable
from flockstep.report.formatting import lines, pieces

ROOMY, NARROW = 24, 14
"""Widths in characters of a text column. Before a text column of rank 0 becomes narrower than ROOMY, or another text
column narrower than NARROW, other columns are left out.
"""
TEXT_WIDTH = 100
"""Width in characters of a table as text."""
GAP = 2
"""Number of blank characters between two columns of a table."""


@dataclass(frozen=True)
class TableColumn:
    """A column of a table: its heading, what it holds, and when a narrow terminal leaves it out."""

    heading: str
    text: bool = False
    """Whether the column holds text, which may be broken between words; other columns hold numbers."""
    rank: int = 0
    """Rank of the column: a narrow terminal leaves out the highest ranks first, and never columns of rank 0."""
    note: str = ""
    """Sentence that explains the column, printed below the table if the column is shown."""
    cell: Callable[[Any], str] = str
    """Text of the column's cell in the row of a value."""


@dataclass(frozen=True)
class TextTable:
    """A table that fits the width of the console that prints it.

    Words and numbers are never broken. If the columns do not fit, the columns of the highest rank are left out, and a
    line below the table names them.
    """

    columns: Sequence[TableColumn]
    rows: Sequence[Sequence[str]]
    title: str = ""
    styles: Mapping[int, str] = field(default_factory=dict)
    """Row number → rich style of the row."""
    marks: Mapping[str, str] = field(default_factory=dict)
    """Text of a cell → rich style of every cell with this text."""
    total: bool = False
    """Whether the last row is a sum, which a line separates from the other rows."""
    notes: Sequence[str] = ()
    """Sentences that are printed below the table."""

    def __post_init__(self) -> None:
        shown = [replace(one, heading=printable(one.heading), note=printable(one.note)) for one in self.columns]
        object.__setattr__(self, "columns", shown)
        object.__setattr__(self, "rows", [list(map(printable, row)) for row in self.rows])
        object.__setattr__(self, "title", printable(self.title))
        object.__setattr__(self, "notes", list(map(printable, self.notes)))

    @classmethod
    def of(cls, columns: Sequence[TableColumn], values: Iterable[Any], **more: Any) -> Self:
        """Return a table with a row for each value, whose cells the columns make; `more` are further fields."""
        return cls(columns, [[one.cell(value) for one in columns] for value in values], **more)

    @property
    def explained(self) -> list[str]:
        """The sentences below the table with all its columns."""
        return [*(one.note for one in self.columns if one.note), *self.notes]

    def __str__(self) -> str:
        """The table as text without colors, in lines of at most 100 characters."""
        text = io.StringIO()
        Console(file=text, width=TEXT_WIDTH, color_system=None, highlight=False).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def to_html(self, sentences: Sequence[str] = ()) -> str:
        """Return the whole table and its notes as escaped HTML for a notebook, with sentences below it."""
        sides = ["left" if one.text else "right" for one in self.columns]
        style = [f'<{{}} style="text-align:{side};vertical-align:top">{{}}</{{}}>' for side in sides]

        def row(kind: str, texts: Iterable[str]) -> str:
            cells = (one.format(kind, html.escape(text), kind) for one, text in zip(style, texts, strict=True))
            return f"<tr>{''.join(cells)}</tr>"

        heads = row("th", (one.heading for one in self.columns))
        title = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        below = "".join(f"<div>{html.escape(sentence)}</div>" for sentence in (*self.explained, *sentences))
        return f"<table>{title}{heads}{''.join(row('td', cells) for cells in self.rows)}</table>{below}"

    def shown(self, width: int) -> list[int]:
        """Return the numbers of the columns that fit into `width` characters."""
        kept = list(range(len(self.columns)))
        while self._needs(kept, roomy=True) > width:
            last = max(reversed(kept), key=lambda place: self.columns[place].rank)
            if self.columns[last].rank == 0:
                break
            kept.remove(last)
        return kept

    def left_out(self, width: int) -> str | None:
        """Return a sentence that names the columns that do not fit into `width` characters; None if all columns fit."""
        kept = self.shown(width)
        names = [one.heading for place, one in enumerate(self.columns) if place not in kept]
        return f"Left out to fit {width} columns: {', '.join(names)}." if names else None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        if self.title:
            yield Text("\n".join(lines(self.title, width)), style="bold")
        yield self._rows(width)
        explained = [one.note for place in self.shown(width) if (one := self.columns[place]).note]
        for sentence in [*filter(None, [self.left_out(width)]), *explained, *self.notes]:
            yield Text("\n".join(lines(sentence, width)), style="dim")

    def _rows(self, width: int) -> Table:
        kept = self.shown(width)
        widths = dict(zip(kept, self._widths(kept, width), strict=True))
        made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
        for place in kept:
            one = self.columns[place]
            justify, head = "left" if one.text else "right", "\n".join(lines(one.heading, widths[place]))
            made.add_column(Text(head), justify=justify, vertical="top", overflow="fold", width=widths[place])  # type: ignore[arg-type]
        for number, row in enumerate(self.rows):
            if self.total and number == len(self.rows) - 1:
                made.add_section()
            cells = [
                Text("\n".join(lines(row[place], widths[place])), self.marks.get(row[place], "")) for place in kept
            ]
            made.add_row(*cells, style=self.styles.get(number))
        return made

    def _cells(self, place: int) -> Iterator[str]:
        return (row[place] for row in self.rows)

    def _least(self, place: int, roomy: bool = False) -> int:
        """Characters without which a word or a figure of the column would be broken; text may also be `roomy`."""
        heading = max((cell_len(part) for part in self.columns[place].heading.split()), default=1)
        if not self.columns[place].text:
            return max([heading, *map(cell_len, self._cells(place))])
        words = [cell_len(part.rstrip()) for cell in self._cells(place) for part in pieces(cell)]
        room = min(self._most(place), NARROW if self.columns[place].rank else ROOMY) if roomy else 1
        return max([heading, room, *words])

    def _most(self, place: int, heads: int = 2) -> int:
        """Characters with which the column needs one line a row, and at most `heads` lines for its heading."""
        heading = self.columns[place].heading
        head = next(width for width in range(1, len(heading) + 2) if len(lines(heading, width)) <= heads)
        return max([head, *map(cell_len, self._cells(place))])

    def _needs(self, kept: Sequence[int], roomy: bool = False) -> int:
        return sum(self._least(place, roomy) for place in kept) + GAP * (len(kept) - 1)

    def _widths(self, kept: Sequence[int], width: int) -> list[int]:
        """Characters of each column: what it needs, and a share of the rest, first for text and last for headings."""
        found = {place: self._least(place) for place in kept}
        spare = width - self._needs(kept)
        texts = [place for place in kept if self.columns[place].text]
        for places, heads in ((texts, 2), (kept, 2), (kept, 1)):
            more = {place: max(0, self._most(place, heads) - found[place]) for place in places}
            for number, place in enumerate(sorted(more, key=lambda one: more[one])):
                given = max(0, min(more[place], spare // (len(more) - number)))
                found[place] += given
                spare -= given
        return [found[place] for place in kept]
