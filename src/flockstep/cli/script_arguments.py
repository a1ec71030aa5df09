"""Names arguments of a script that look like options of `flockstep launch`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile

import typer

from flockstep.cli import show

OPTION = re.compile(r"--[\w-]+|-\w(?=$|=|\d)")
"""The name at the beginning of an option: `--seed` of `--seed=1`, `-n` of `-n4`."""


def tell_options(context: typer.Context, script: str, arguments: Sequence[str]) -> None:
    """Print a warning if a script gets options that `flockstep launch` knows.

    A `--` before the script, or before the option, states that the options are the script's.
    """
    typed = context.obj["arguments"]
    if "--" in typed[typed.index("launch") : len(typed) - len(arguments)]:
        return
    takes_value: dict[str, bool] = {}
    for parameter in context.command.params:
        takes_value |= dict.fromkeys(parameter.opts, not getattr(parameter, "is_flag", False))
    found = _options(list(takewhile(lambda word: word != "--", arguments)), takes_value)
    _tell(found, script, f"write {_it(found)} before the script if meant for flockstep")


def _options(words: Sequence[str], takes_value: Mapping[str, bool]) -> list[str]:
    """The options in `words` whose names are keys of `takes_value`, each with its value."""
    options = []
    for word, following in pairwise([*words, "-"]):
        name = found[0] if (found := OPTION.match(word)) else ""
        if name in takes_value:
            separate = takes_value[name] and word == name and not following.startswith("-")
            options.append(f"{word} {following}" if separate else word)
    return options


def _tell(options: Sequence[str], script: str, way: str) -> None:
    if options:
        are = "is" if len(options) == 1 else "are"
        text = (
            f"flockstep: {' '.join(options)} {are} handed to {script}; {way}, or put -- before {script} if meant for "
            "the script"
        )
        show.note(text)


def _it(options: Sequence[str]) -> str:
    return "it" if len(options) == 1 else "them"
