"""Commands that another installed distribution adds to the command line, found through its entry points."""

from __future__ import annotations

from typing import Any

import typer

from flockstep.cli.help_text import PlainGroup
from flockstep.errors import ConfigurationError

LAB = {
    "reproduce": "Reproduce published results: print the published figure, the measured figure, and whether the claim "
    "holds.",
    "chaos": "Kill, stop and slow processes of real runs at random, resume the runs, and check invariants of their "
    "records.",
    "bench": "Measure transports, collectives, codecs and the simulator, and compare each with other implementations.",
}
"""Command of the distribution flockstep-lab → what it does."""


def plugged_in(name: str) -> Any:
    """Import and return a command of the group `flockstep.commands`, whose entry points are `typer.Typer` objects.

    Raises:
        ConfigurationError: no installed distribution has the command.
    """
    from importlib.metadata import entry_points  # here, since few commands need it

    for found in entry_points(group="flockstep.commands", name=name):
        return typer.main.get_command(found.load())
    raise ConfigurationError(
        f"flockstep {name} belongs to the distribution flockstep-lab, which is not installed; install it with pip "
        "install flockstep-lab, or in a clone with pip install -e lab"
    )


class CommandGroup(PlainGroup):
    """The commands of flockstep; the ones in `LAB` are imported when they are called, and only described in --help."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the name of the command in `args`, the command, and the arguments that follow its name."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, plugged_in(name) if name in LAB else command, rest
