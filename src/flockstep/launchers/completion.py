"""Completes the record of a run that has ended with its summary."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from flockstep.errors import Diverged, Interrupted
from flockstep.launchers.signals import undisturbed
from flockstep.records import owner
from flockstep.records.config import RunConfig
from flockstep.records.folder import RunFolder
from flockstep.records.summary import Status, summarize


@contextlib.contextmanager
def finished(record: RunFolder, config: RunConfig) -> Iterator[list[str]]:
    """Context manager around a run that writes a summary, with the run's status and notes, to the record however the
    run ends.
    """
    status: Status = "failed"
    text, notes = None, list[str]()
    try:
        yield notes
        status = "finished"
    except (KeyboardInterrupt, Interrupted) as error:
        status, text = "interrupted", str(error) or "interrupted"
        raise
    except Exception as error:
        status, text = "diverged" if isinstance(error, Diverged) else "failed", str(error)
        raise
    finally:
        if owner.is_ours(record.path):
            with undisturbed():
                try:
                    record.write_summary(summarize(config, record.merge_events(), status, text, notes))
                except OSError:
                    if status == "finished":
                        raise  # otherwise the error that has ended the run is told
