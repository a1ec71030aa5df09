"""Refuses options of `flockstep launch` that stand after the script, where they are arguments of the script."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise, takewhile

import typer

from flockstep.errors import ConfigurationError

OPTION = re.compile(r"--[\w-]+|-\w(?=$|=|\d)")
"""The name at the beginning of an option: `--seed` of `--seed=1`, `-n` of `-n4`."""
OWN = "--debug"
"""Option that is the script's if it stands after the script."""


def refuse_misplaced(context: typer.Context, script: str, arguments: Sequence[str]) -> None:
    """Check that a script gets no options that `flockstep launch` knows.

    A `--` before the script, or before the option, states that the options are the script's.

    Raises:
        ConfigurationError: there is such an option; the message has the right order.
    """
    typed = context.obj["arguments"]
    before = typed[typed.index("launch") + 1 : len(typed) - len(arguments) - 1]
    if "--" in before:
        return
    takes_value: dict[str, bool] = {}
    for parameter in context.command.params:
        takes_value |= dict.fromkeys(parameter.opts, not getattr(parameter, "is_flag", False))
    options = []
    for word, following in pairwise([*takewhile(lambda word: word != "--", arguments), "-"]):
        name = found[0] if (found := OPTION.match(word)) else ""
        if name in takes_value and name != OWN:
            separate = takes_value[name] and word == name and not following.startswith("-")
            options.append(f"{word} {following}" if separate else word)
    if not options:
        return
    order = " ".join(["flockstep launch", *before, *options, script])
    stand = "stands" if len(options) == 1 else "stand"
    raise ConfigurationError(
        f"{' '.join(options)} {stand} after {script} and would be handed to the script; write {order}, or put -- "
        f"before {script} if the script has such an option"
    )
