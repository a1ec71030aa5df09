"""Guards the reading of records: no code of a record is executed, except Python files that the user has passed with
--import.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from flockstep.errors import ConfigurationError, FlockstepError
from flockstep.frameworks.job import JOB_FILES
from flockstep.records.config import JOB_FILE, RunConfig
from flockstep.runtime.setup import digest
from flockstep.workloads.base import Workload


class NotAskedFor(ConfigurationError):
    """Error: a record names a Python file that the user has not passed with --import."""


def trusted(config: RunConfig, folder: Path | str, files: Sequence[str]) -> RunConfig:
    """Return the configuration in a record, in which the user's files replace the record's files of the same names.

    Raises:
        NotAskedFor: the record names a file that the user has not passed.
    """
    given = {Path(file).name: file for file in files}
    job = (config.job,) if config.job.endswith(JOB_FILES) else ()
    given.update({Path(name).name: file for name in job for file in files if same_job(config, file)})
    for file in (*config.imports, *job):
        if Path(file).name not in given:
            raise NotAskedFor(
                f"the record in {folder} needs the Python file {file!r}, but code that a record names runs only at "
                "your request; inspect the file, then pass it in imports (on the command line: --import FILE)"
            )
    imports = tuple(given[Path(file).name] for file in config.imports)
    return dataclasses.replace(config, imports=imports, job=given[Path(config.job).name] if job else config.job)


def same_job(config: RunConfig, what: str) -> bool:
    """Return whether `what` is the job of a record: the same workload, however it is written, or a file with the same
    content.
    """
    if not (config.job.endswith(JOB_FILES) and what.endswith(JOB_FILES)):
        return what == config.job or (_workload(what) is not None and _workload(what) == _workload(config.job))
    recorded, theirs, ours = config.versions.get(JOB_FILE), Path(config.job), Path(what)
    if recorded is None and theirs.is_file():  # a record without a digest of the file
        recorded = digest(theirs)
    return ours.is_file() and digest(ours) == recorded


def _workload(text: str) -> Workload | None:
    try:
        return Workload.parse(text)
    except FlockstepError:
        return None
