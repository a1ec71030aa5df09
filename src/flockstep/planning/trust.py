"""Whose code is run where a record is looked at: files that its reader names, and no other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from flockstep.drivers.setup import JOB_FILE, digest
from flockstep.errors import ConfigurationError, FlockstepError
from flockstep.records.config import RunConfig
from flockstep.workloads.base import Workload


class NotAskedFor(ConfigurationError):
    """A record names a Python file that its reader has not named."""


def trusted(config: RunConfig, folder: Path | str, files: Sequence[str]) -> RunConfig:
    """The configuration in a record with the reader's own files, told by their names, in place of those it says.

    Raises:
        NotAskedFor: it says one that is not among them.
    """
    given = {Path(file).name: file for file in files}
    job = (config.job,) if config.job.endswith(".py") else ()
    given.update({Path(name).name: file for name in job for file in files if same_job(config, file)})
    for file in (*config.imports, *job):
        if Path(file).name not in given:
            raise NotAskedFor(
                f"the record in {folder} needs the Python file {file!r}, and no record's code is run unasked; look at "
                "that file, and name it in imports, on the command line with --import FILE"
            )
    imports = tuple(given[Path(file).name] for file in config.imports)
    return dataclasses.replace(config, imports=imports, job=given[Path(config.job).name] if job else config.job)


def same_job(config: RunConfig, what: str) -> bool:
    """Whether `what` is the job of a record: the same workload however written, or a file with the same content."""
    if not (config.job.endswith(".py") and what.endswith(".py")):
        return what == config.job or (_workload(what) is not None and _workload(what) == _workload(config.job))
    recorded, theirs, ours = config.versions.get(JOB_FILE), Path(config.job), Path(what)
    if recorded is None and theirs.is_file():  # of a record that does not tell the content
        recorded = digest(theirs)
    return ours.is_file() and digest(ours) == recorded


def _workload(text: str) -> Workload | None:
    try:
        return Workload.parse(text)
    except FlockstepError:
        return None
