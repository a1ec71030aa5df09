"""The pages of the site's reference, made from the registry, the docstrings and the command line; none is a file here.

`hooks.py` puts them into the site. `python docs/reference.py FOLDER` writes them into a folder, to be looked at.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import flockstep
import flockstep.testing

sys.path.insert(0, str(Path(__file__).parent))
from generate import attribute_docstrings, table

from flockstep import errors
from flockstep.cli import listing
from flockstep.cli.app import app
from flockstep.cli.commands import commands_of

WIDTH = 88
"""Characters of a signature that stay on one line."""
WHOLE = "{.whole}"
"""Mark of a name that is not broken into lines."""
ELSEWHERE = ("claim",)
"""Kinds of component that have a page of their own in docs/."""
RETURNED = (
    "flockstep.runtime.torch_loop:DistributedOptimizer",
    "flockstep.communicator.communicator:Communicator",
    "flockstep.communicator.window:Window",
)
"""Classes of what `distribute`, `join` and `window` return."""
_SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes):$")
_WORDS = {"Args": "Arguments", "Attributes": "Attributes", "Raises": "Raises", "Returns": "Returns", "Yields": "Yields"}
_ITEM = re.compile(r"^(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*): (.*)$", re.DOTALL)


class Page(NamedTuple):
    """A page of the reference."""

    path: str
    """Place in the site."""
    title: str
    """Title in the navigation."""
    text: str
    component: bool = False
    """Whether the page lists a kind of component."""


def pages() -> list[Page]:
    """Every generated page, in the order of the navigation."""
    found = [
        Page("reference/command-line.md", "Options of every command", command_line()),
        Page("reference/python.md", "Python: functions", functions()),
        Page("reference/classes.md", "Python: classes", classes()),
        Page("reference/testing.md", "Python: conformance checks", testing()),
        Page("reference/errors.md", "Python: errors", error_tree()),
    ]
    kinds = [noun for noun in listing.nouns() if noun not in ELSEWHERE]
    return found + [Page(f"reference/{listing.plural(noun)}.md", title(noun), components(noun), True) for noun in kinds]


def title(noun: str) -> str:
    """The title of the page of a kind of component."""
    return listing.plural(noun).replace("_", " ").capitalize()


def components(noun: str) -> str:
    """All components of a kind: how each is written, its docstring, its arguments and their defaults."""
    rows = listing.listing(noun)
    about = listing.ABOUT[noun]
    heading = f"# {title(noun)}\n\n{about[:1].upper()}{about[1:]}."
    short = [row for row in rows if row["summary"].startswith("short for ")]
    parts = [heading, *(_component(noun, row) for row in rows if row not in short)]
    if short:
        meanings = [(f"`{row['name']}`", f"`{row['summary'].removeprefix('short for ')}`") for row in short]
        parts.append("## Short names\n\n" + table(("name", "short for"), meanings))
    return "\n\n".join(parts) + "\n"


def _component(noun: str, row: dict[str, str]) -> str:
    known = listing.described(noun, row["name"])
    parts = [f"## {known['name']}"]
    if known["arguments"]:
        parts.append(f"```text\n{known['write']}\n```")
    parts.append(markdown(known["about"]))
    if known["arguments"]:
        cells = [
            (
                f"`{one['name']}`{WHOLE}",
                f"`{one['type']}`",
                "required" if one["default"] is None else f"`{one['default']}`",
            )
            for one in known["arguments"]
        ]
        parts.append(table(("argument", "type", "default"), cells))
    return "\n\n".join(parts)


def command_line() -> str:
    """Every command with its arguments and its options."""
    parts = [
        "# Options of every command",
        textwrap.dedent(
            """\
            `flockstep help COMMAND` prints the options of a command, too. Exit codes: 0 the command did what it was
            asked to, 1 the run failed, 2 the input was refused, 130 the command was interrupted. `--debug`, before or
            after a command, shows the traceback of an error; `flockstep launch` takes it before the script."""
        ),
    ]
    for name, command in commands_of(app):
        parts += [f"## flockstep {name}", escaped(inspect.cleandoc(command.help or "")), _usage(name, command)]
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        if arguments:
            cells = [(f"`{p.name.upper()}`{WHOLE}", escaped(p.help or "")) for p in arguments]
            parts.append(table(("argument", "meaning"), cells))
        panels: dict[str, list[tuple[str, ...]]] = {}
        for option in command.params:
            if option.param_type_name == "option" and not option.hidden:
                panels.setdefault(getattr(option, "panel", "Options"), []).append(_option(option))
        parts += [table((panel, "default", "meaning"), rows) for panel, rows in panels.items()]
    return "\n\n".join(parts) + "\n"


def _usage(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    words = [p.name.upper() if p.required else f"[{p.name.upper()}]" for p in arguments]
    return "```text\n" + " ".join(["flockstep", name, *words, "[OPTIONS]"]) + "\n```"


def _option(option: Any) -> tuple[str, ...]:
    names = ", ".join(f"`{name}`{WHOLE}" for name in (*option.opts, *option.secondary_opts))
    if option.required:
        default = "required"
    else:
        default = getattr(option, "usual", "") or ("" if option.is_flag or option.default is None else option.default)
        default = f"`{default}`" if default != "" else ""
    return names, default, escaped(option.help or "")


def functions() -> str:
    """The functions of `flockstep`."""
    found = {name: member for name, member in _exported().items() if not isinstance(member, type)}
    parts = [
        "# The Python API: functions",
        textwrap.dedent(
            """\
            Every function on this page is imported from `flockstep`. `import flockstep` itself loads no framework.
            [The classes](classes.md) of arguments and results have a page of their own."""
        ),
        *(_function("##", name, function) for name, function in found.items()),
    ]
    return "\n\n".join(parts) + "\n"


def classes() -> str:
    """The classes of `flockstep`, and those of what its functions return."""
    found = {name: member for name, member in _exported().items() if isinstance(member, type)}
    for place in RETURNED:
        module, _, name = place.partition(":")
        found[name] = getattr(importlib.import_module(module), name)
    returned = ", ".join(f"`{place.partition(':')[2]}`" for place in RETURNED)
    parts = [
        "# The Python API: classes",
        f"Classes on this page are imported from `flockstep`, except {returned}, which [functions](python.md) return.",
        *(_class(name, kind) for name, kind in found.items()),
    ]
    return "\n\n".join(parts) + "\n"


def _exported() -> dict[str, Any]:
    return {name: getattr(flockstep, name) for name in flockstep.__all__ if not name.startswith("__")}


def testing() -> str:
    """The public functions and classes of `flockstep.testing`, module by module."""
    parts = ["# The Python API: conformance checks", markdown(inspect.getdoc(flockstep.testing) or "")]
    for found in pkgutil.iter_modules(flockstep.testing.__path__):
        module = importlib.import_module(f"flockstep.testing.{found.name}")
        parts += [f"## {module.__name__}", markdown(inspect.getdoc(module) or "")]
        for name, member in _public(module):
            parts.append(_class(name, member, "###") if isinstance(member, type) else _function("###", name, member))
    return "\n\n".join(parts) + "\n"


def error_tree() -> str:
    """Every class of error with its docstring and its exit code."""
    drawing = (inspect.getdoc(errors) or "").partition("\n\n")
    rows = [
        (f"`{name}`", escaped(inspect.getdoc(kind) or ""), f"`{kind.__base__.__name__}`", str(kind.exit_code))
        for name, kind in _public(errors)
        if isinstance(kind, type)
    ]
    heading = ("class", "meaning", "kind of", "exit code of a command")
    return "\n\n".join(
        [
            "# Errors",
            "Import errors from `flockstep.errors`. A message says which value was given, the rule, and the way out.",
            f"```text\n{drawing[2]}\n```",
            table(heading, rows),
        ]
    )


def _public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The functions and classes that a module defines, in the order of its text."""
    members = [
        (name, member)
        for name, member in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(member) or inspect.isclass(member))
        and member.__module__ == module.__name__
    ]
    yield from sorted(members, key=lambda item: inspect.getsourcelines(item[1])[1])


def _function(level: str, name: str, function: Callable[..., Any]) -> str:
    return f"{level} {name}\n\n{signature(name, function)}\n\n{markdown(inspect.getdoc(function) or '')}"


def _class(name: str, kind: type, level: str = "##") -> str:
    parts = [f"{level} {name}"]
    if dataclasses.is_dataclass(kind):
        parts.append(signature(name, kind))
    parts.append(markdown(inspect.getdoc(kind) or ""))
    fields = [*_fields(kind), *_properties(kind)]
    if fields:
        parts.append(table(("attribute", "meaning"), fields))
    for method, function, shown in _methods(kind):
        parts += [f"{level}# {name}.{method}", shown, markdown(inspect.getdoc(function) or "")]
    return "\n\n".join(parts)


def _ours(kind: type) -> list[type]:
    """The classes of flockstep that `kind` inherits from, itself first."""
    return [one for one in kind.__mro__ if one.__module__.startswith("flockstep")]


def _fields(kind: type) -> Iterator[tuple[str, str]]:
    """The documented fields of a class and of the classes that it inherits from."""
    seen: set[str] = set()
    for one in _ours(kind):
        for name, text in attribute_docstrings(one).items():
            if not name.startswith("_") and name not in seen:
                seen.add(name)
                yield f"`{name}`{WHOLE}", escaped(text)


def _properties(kind: type) -> Iterator[tuple[str, str]]:
    for name, member in inspect.getmembers(kind, lambda member: isinstance(member, property)):
        defined = next(one for one in kind.__mro__ if name in vars(one))
        if not name.startswith("_") and defined in _ours(kind):
            yield f"`{name}`{WHOLE}", escaped(" ".join((inspect.getdoc(member) or "").split()))


def _methods(kind: type) -> Iterator[tuple[str, Any, str]]:
    """Name, function and signature of each public method, in the order of the text."""
    seen: set[str] = set()
    for one in _ours(kind):
        for name, member in vars(one).items():
            if name.startswith("_") or name in seen or isinstance(member, property):
                continue
            function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            if inspect.isfunction(function):
                seen.add(name)
                yield name, getattr(kind, name), signature(name, function, leave_out=("self", "cls"))


def signature(name: str, function: Any, leave_out: tuple[str, ...] = ()) -> str:
    """A function's or class's signature as a block of Python; one argument a line where it is long."""
    found = inspect.signature(function)
    kept = [_raw(one) for one in found.parameters.values() if one.name not in leave_out]
    result = inspect.Signature.empty if isinstance(function, type) else _Text.of(found.return_annotation)
    whole = found.replace(parameters=kept, return_annotation=result)
    text = f"{'async ' if inspect.iscoroutinefunction(function) else ''}{name}{whole}"
    if len(text) > WIDTH:
        inside, _, after = text.rpartition(")")
        head, _, _ = inside.partition("(")
        body = "".join(f"    {one},\n" for one in _lines(kept))
        text = f"{head}(\n{body}){after}"
    return f"```python\n{text}\n```"


class _Text(str):
    """An annotation that shows itself as it was written."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    @classmethod
    def of(cls, annotation: Any) -> Any:
        return cls(annotation) if isinstance(annotation, str) else annotation


def _raw(parameter: inspect.Parameter) -> inspect.Parameter:
    return parameter.replace(annotation=_Text.of(parameter.annotation))


def _lines(parameters: Iterable[inspect.Parameter]) -> Iterator[str]:
    starred = False
    for one in parameters:
        if one.kind is inspect.Parameter.VAR_POSITIONAL:
            starred = True
        if one.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        yield str(one)


def markdown(docstring: str) -> str:
    """A docstring as Markdown: prose, and lists of arguments, results and errors."""
    parts: list[str] = []
    section, lines = "", list[str]()
    for line in [*docstring.splitlines(), "Returns:"]:  # the last one closes what stands before it
        found = _SECTION.match(line)
        if found is None:
            lines.append(line)
            continue
        if any(lines):
            parts.append(_section(section, textwrap.dedent("\n".join(lines)).strip("\n")))
        section, lines = found[1], []
    return "\n\n".join(parts)


def _section(name: str, text: str) -> str:
    if not name:
        return "\n\n".join(_paragraph(part) for part in text.split("\n\n"))
    if name in ("Returns", "Yields"):
        return f"**{name}**: " + _paragraph(text)
    items = re.split(r"\n(?=\S)", text)
    found = [_ITEM.match(item) for item in items]
    lines = [
        f"- `{match[1]}`: {escaped(' '.join(match[2].split()))}" if match else f"- {escaped(' '.join(item.split()))}"
        for item, match in zip(items, found, strict=True)
    ]
    return f"**{_WORDS[name]}**\n\n" + "\n".join(lines)


def _paragraph(text: str) -> str:
    """Prose; a drawing or a program, which is indented, stays as it is."""
    if all(line.startswith("    ") for line in text.splitlines()):
        return f"```text\n{textwrap.dedent(text)}\n```"
    return escaped(text)


def escaped(text: str) -> str:
    """`text` without what Markdown would take for emphasis or HTML; code between backquotes stays as it is."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if piece.startswith("`") else _linked(_escaped(piece)) for piece in pieces)


def _linked(text: str) -> str:
    """`text` with links to the pages that it names by their files."""
    return re.sub(r"\bdocs/([\w/-]+\.md)", r"[\g<0>](../\1)", text)


def _escaped(text: str) -> str:
    starts = re.compile(r"^([*-]) ", re.MULTILINE)  # of lists
    kept = starts.sub("\0 ", text)
    return re.sub(r"([*_\[\]])", r"\\\1", kept.replace("<", "&lt;")).replace("\0", "-")


def main() -> None:
    """Write the pages into the folder that the command names."""
    folder = Path(sys.argv[1])
    for page in pages():
        path = folder / page.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page.text, "utf-8")


if __name__ == "__main__":
    main()
