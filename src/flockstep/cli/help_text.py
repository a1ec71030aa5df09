"""Help in plain text, under the headings that commands and options name; typer's own help loads a Markdown parser."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

F = TypeVar("F", bound=Callable[..., Any])
Row = tuple[str, tuple[str, str]]
"""A heading, and below it the name of a command or an option beside its text."""


class PlainCommand(TyperCommand):
    """A command whose help lists the options under their headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections of the help that follow the command's description."""
        _write(formatter, _options(self, ctx))


class PlainGroup(TyperGroup):
    """A group of commands whose help lists options and commands under their headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections of the help that follow the command's description."""
        _write(formatter, _options(self, ctx))
        rows = [(name, command) for name, command in self.commands.items() if not command.hidden]
        _write(
            formatter,
            [
                (getattr(one, "rich_help_panel", None) or "Commands", (name, one.get_short_help_str(limit=400)))
                for name, one in rows
            ],
        )


class App(typer.Typer):
    """A collection of commands with help in plain text."""

    def __init__(self, **settings: Any):
        super().__init__(**{"cls": PlainGroup, "rich_markup_mode": None} | settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[F], F]:
        """Return the decorator that adds a function as a command."""
        decorator: Callable[[F], F] = super().command(name, **{"cls": PlainCommand} | settings)
        return decorator


def _options(command: Any, ctx: Any) -> Iterable[Row]:
    for parameter in command.get_params(ctx):
        if (record := parameter.get_help_record(ctx)) is not None:
            usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
            yield getattr(parameter, "rich_help_panel", None) or usual, record


def _write(formatter: Any, rows: Iterable[Row]) -> None:
    sections: dict[str, list[tuple[str, str]]] = {}
    for heading, row in rows:
        sections.setdefault(heading, []).append(row)
    for heading, lines in sections.items():
        with formatter.section(heading):
            formatter.write_dl(lines)
