"""The settings that must agree on all hosts of a run."""

from __future__ import annotations

from collections.abc import Mapping

ARGUMENTS, MODULE, IMPORT = "arguments of the script", "module", "import "
"""Names of settings that hosts compare: the script's arguments, its module, and the prefix before the name of a file
with custom components.
"""


def files_in(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that name files, each with the hash of the file, and the script's arguments."""
    files = "job", MODULE, ARGUMENTS
    return {name: text for name, text in settings.items() if name in files or name.startswith(IMPORT)}


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """Return text about the first setting in which a host differs from the coordinator; None if all settings agree."""
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            absent = "missing" if files_in({name: ""}) else "the default"
            return f"{name} is {theirs.get(name, absent)} on that host and {ours.get(name, absent)} at the coordinator"
    return None
