"""The record of a run: its configuration, its events, and the summary computed from them."""

from flockstep.records.config import RunConfig, same_run
from flockstep.records.folder import EventWriter, Record, RunFolder
from flockstep.records.summary import Summary, WorkerTotals, summarize

__all__ = ["EventWriter", "Record", "RunConfig", "RunFolder", "Summary", "WorkerTotals", "same_run", "summarize"]
