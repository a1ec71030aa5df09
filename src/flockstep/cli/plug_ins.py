"""Commands that another installed distribution adds to the command line, found through its entry points."""

from __future__ import annotations

from typing import Any

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
    """Import and return a command of the group `flockstep.commands`: a function or a `click` command.

    Raises:
        ConfigurationError: no installed distribution has the command.
    """
    from importlib.metadata import entry_points  # here, since few commands need it

    for found in entry_points(group="flockstep.commands", name=name):
        return found.load()
    raise ConfigurationError(
        f"flockstep {name} belongs to the distribution flockstep-lab, which is not installed; install it in "
        "a clone of the repository with pip install -e lab"
    )
