"""Makes commands of functions. Each parameter is an option or an argument; a parameter whose type is a structure of
options stands for all fields of the structure.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import click
from click.shell_completion import CompletionItem

from flockstep.errors import ConfigurationError, UnknownName
from flockstep.options import Opt, options_of

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
REST = SETTINGS | {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Settings of a command whose words after the first argument belong to a script or to another command."""


class _NumberType(click.ParamType[Any]):
    """The type of an option that takes a number or, if it takes `many`, numbers with commas between them."""

    def __init__(self, whole: bool, many: bool = False) -> None:
        self.whole, self.many, self.name = whole, many, "int" if whole else "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if self.many:
            words = value.split(",") if isinstance(value, str) else value
            return tuple(_NumberType(self.whole).convert(word, param, ctx) for word in words)
        try:
            return int(value) if self.whole else float(value)
        except ValueError:
            what, example = ("a whole number", "4") if self.whole else ("a number", "0.1")
            if re.fullmatch(r"[0-9.]{1,9}[eE]\+?[0-9]", str(value)):
                example = f"{float(value):.0f}"
            name = param.opts[0] if param is not None else "value"
            raise ConfigurationError(f"{name} must be {what}, got {value!r}; write it like {example}") from None


class _PanelOption(click.Option):
    """An option with its heading in `--help`, and with its default in words."""

    panel = "Options"
    usual = ""

    def get_help_extra(self, ctx: click.Context) -> Any:
        extra = super().get_help_extra(ctx)
        return extra | {"default": self.usual} if self.usual else extra


def _parameter_of(name: str, option: Opt, hint: Any, default: Any) -> click.Parameter:
    """Return the parameter for a field of type `hint`; a field without a default (`empty`) must be given."""
    kinds = [hint] if get_origin(hint) is Literal else [one for one in get_args(hint) or (hint,) if one is not NoneType]
    listed = next((one for one in (hint, *kinds) if get_origin(one) in (list, tuple, Sequence)), None)
    if listed is not None:
        kinds = [get_args(listed)[0]]
    flag, required = bool in kinds, default is inspect.Parameter.empty
    kind: Any = str
    if flag:
        kind = bool
    elif get_origin(kinds[0]) is Literal:
        kind = click.Choice(get_args(kinds[0]))
    elif Path in kinds and kinds[0] is not str:
        kind = click.Path(path_type=Path)
    elif option.separated:
        kind = _NumberType(whole=False, many=True)
    elif str not in kinds and {int, float} & set(kinds):
        kind = _NumberType(whole=float not in kinds)

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from flockstep import registry

        if option.complete is not None:
            return [CompletionItem(word) for word in option.complete(incomplete)]
        parts = (registry.names, registry.aliases, registry.catalog)
        words = [word for noun in option.nouns for names in parts for word in names(noun)]
        return [CompletionItem(word) for word in words if word.startswith(incomplete)]

    completes = option.nouns or option.complete is not None
    common: dict[str, Any] = {"type": kind, "shell_complete": complete if completes else None, "help": option.help}
    common |= {"metavar": option.metavar, "required": required}
    common |= {} if required else {"default": None if listed is not None else default}
    if option.positional:
        return click.Argument([name], nargs=1 if listed is None else -1, **common)
    shown = not (required or flag or default in (None, ()))
    many = listed is not None and not option.separated
    names = option.names or (option.written(name),)
    made = _PanelOption([name, *names], show_default=shown, is_flag=flag, multiple=many, **common)
    made.panel = option.panel
    made.usual = option.shown or ("" if default is not None or option.usual is None else str(option.usual))
    return made


def _write_panels(rows: Iterable[tuple[str, tuple[str, str]]], formatter: click.HelpFormatter) -> None:
    """Write rows of `--help` under their headings."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for heading, row in rows:
        panels.setdefault(heading, []).append(row)
    for heading, found in panels.items():
        with formatter.section(heading):
            formatter.write_dl(found)


class _PanelCommand(click.Command):
    """A command whose help has a heading for each group of options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [one for one in self.get_params(ctx) if not isinstance(one, click.Argument)]
        rows = [(getattr(one, "panel", "Options"), one.get_help_record(ctx)) for one in options]
        _write_panels([(heading, row) for heading, row in rows if row is not None], formatter)


def command_of(function: Callable[..., None], name: str, settings: dict[str, Any] = SETTINGS) -> _PanelCommand:
    """Return the command that calls a function with what the command line gives.

    The function's parameters are annotated with `Opt`, are structures of options, or are the command's context. Its
    docstring is the help.
    """
    hints = get_type_hints(function, include_extras=True)
    signature = inspect.signature(function)
    structures = {one: hint for one, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters, defaults = [], {}
    for one, given in signature.parameters.items():
        if one in structures:
            missing, fields = inspect.Parameter.empty, options_of(hints[one]).items()
            found = {
                key: (opt, hint, missing if field.default is dataclasses.MISSING else field.default)
                for key, (opt, hint, field) in fields
            }
        else:
            described = [note for note in getattr(hints[one], "__metadata__", ()) if isinstance(note, Opt)]
            found = {one: (described[0], hints[one].__origin__, given.default)} if described else {}
        for key, (opt, hint, default) in found.items():
            if not opt.python:
                parameters.append(_parameter_of(key, opt, hint, default))
                defaults[key] = default

    @click.pass_context
    def call(context: click.Context, /, **values: Any) -> None:
        given = {key: defaults[key] if value in ((), None) else value for key, value in values.items()}
        arguments: dict[str, Any] = {}
        for one, hint in hints.items():
            if one in structures:
                names = [key for key in options_of(hint) if key in given]
                arguments[one] = hint(**{key: given[key] for key in names})
            elif hint is click.Context:
                arguments[one] = context
            elif one in given:
                arguments[one] = given[one]
        function(**arguments)

    text = inspect.getdoc(function) or ""
    return _PanelCommand(name, params=parameters, callback=call, help=text, context_settings=settings)


class CommandEntry(NamedTuple):
    """A command that is imported when it is called."""

    place: str = ""
    """Module and function or group, as `flockstep.cli.planning:plan`; empty if another distribution has the command."""
    panel: str = "Commands"
    about: str = ""
    """First sentence of the help of another distribution's command."""
    rest: bool = False
    """Whether the words after the first argument belong to a script or to another command."""


class _CommandGroup(click.Group):
    """A group of commands, each of which is imported when it is called or its help is shown."""

    table: Mapping[str, CommandEntry] = {}

    def list_commands(self, ctx: click.Context | None = None) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context | None, name: str) -> click.Command | None:
        if (entry := self.table.get(name)) is None or name in self.commands:
            return self.commands.get(name)
        module, _, what = entry.place.partition(":")
        if module:
            found = getattr(import_module(module), what)
        else:
            from importlib.metadata import entry_points  # here, since few commands need it

            plugged_in = [one.load() for one in entry_points(group="flockstep.commands", name=name)]
            if not plugged_in:
                raise ConfigurationError(
                    f"flockstep {name} belongs to the distribution flockstep-lab, which is not installed; install it "
                    "in a clone of the repository with pip install -e lab"
                )
            found = plugged_in[0]
        settings = REST if entry.rest else SETTINGS
        command = found if isinstance(found, click.Command) else command_of(found, name, settings)
        if module:
            self.commands[name] = command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise UnknownName.among("command", args[0], list(self.table), command="flockstep --help")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = []
        for name, entry in self.table.items():
            command = None if entry.about else self.get_command(ctx, name)
            text = entry.about if command is None else command.get_short_help_str(limit=200)
            rows.append((entry.panel, (name, text)))
        _write_panels(rows, formatter)


def group_of(table: Mapping[str, CommandEntry], own: click.Command, **settings: Any) -> click.Group:
    """Return a group of commands; `own` is what the group does before its command."""
    settings |= {"params": own.params, "callback": own.callback, "help": own.help, "context_settings": SETTINGS}
    group = _CommandGroup(own.name, **settings)
    group.table = table
    return group


def commands_of(group: click.Group, before: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield every command with its name, commands of groups with the group's name before theirs."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from commands_of(command, f"{before}{name} ")
        elif command is not None:
            yield f"{before}{name}", command
