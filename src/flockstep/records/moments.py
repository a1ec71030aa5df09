"""Figures of a summary that single events give: the result's, and the target's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flockstep.records.events import Event, Result, Snapshot


def target_figures(hit: Snapshot | None) -> dict[str, Any]:
    """When the target was reached, by the clock, in samples and in bytes."""
    return {
        "time_to_target": hit.t if hit else None,
        "samples_to_target": hit.samples if hit else None,
        "bytes_to_target": hit.bytes if hit else None,
    }


def result_figures(events: Sequence[Event], notes: Sequence[str]) -> dict[str, Any]:
    """The notes of a run, and as of which step and time the model in result.npy is; `events` in order of time."""
    last = next((event for event in reversed(events) if isinstance(event, Result)), None)
    figures = {} if last is None else {"result_step": last.step, "result_seconds": last.t}
    return {**figures, "notes": list(notes)}
