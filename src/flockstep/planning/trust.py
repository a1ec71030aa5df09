"""Whose code is run where a record is looked at: files that its reader names, and no other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from flockstep.errors import ConfigurationError
from flockstep.records.config import RunConfig


class NotAskedFor(ConfigurationError):
    """A record names a Python file that its reader has not named."""


def trusted(config: RunConfig, folder: Path | str, files: Sequence[str]) -> RunConfig:
    """The configuration in a record with the reader's own files, told by their names, in place of those it says.

    Raises:
        NotAskedFor: it says one that is not among them.
    """
    given = {Path(file).name: file for file in files}
    job = (config.job,) if config.job.endswith(".py") else ()
    for file in (*config.imports, *job):
        if Path(file).name not in given:
            raise NotAskedFor(
                f"the record in {folder} needs the Python file {file!r}, and no record's code is run unasked; look at "
                "that file, and name it with --import FILE"
            )
    imports = tuple(given[Path(file).name] for file in config.imports)
    return dataclasses.replace(config, imports=imports, job=given[Path(config.job).name] if job else config.job)
