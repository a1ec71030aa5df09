"""Results of sealed jobs on their way back: weights and figures, without the customer's data and paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError
from safetensors.numpy import load, save

from flockstep.arrays.schema import FlatArray, Schema
from flockstep.errors import ConfigurationError
from flockstep.options import SEALED
from flockstep.records.access import write_whole
from flockstep.records.config import JOB_FILE, RunConfig
from flockstep.records.events import EvaluationEvent, Event, NodeEvent, ReplicaEvent, ResultEvent, StepEvent
from flockstep.records.folder import Record, RunFolder
from flockstep.records.summary import Summary
from flockstep.sealed import archive

CONFIG, SUMMARY, EVENTS, WEIGHTS = "config.toml", "summary.json", "events.jsonl", "model.safetensors"
SENT = (CONFIG, SUMMARY, EVENTS, WEIGHTS)
"""The sections of a returned run, which are also the names of the files at the sender's."""
SETTINGS = (
    "kind", "job", "strategy", "system", "workers", "seed", "epochs", "steps", "batch", "lr", "schedule",
    "evaluate_every", "result", "split", "target", "metric", "higher_is_better", "facts",
)  # fmt: skip
"""The settings that travel; others could name folders, hosts or files of the customer's."""
FIGURES = (StepEvent, EvaluationEvent, NodeEvent, ReplicaEvent, ResultEvent)
"""The events that travel. They have numbers only; sentences could quote paths, hosts or errors of the customer's."""


def returned(run: Path | str) -> tuple[dict[str, bytes], list[str]]:
    """Return what goes back to the sender of a sealed job, and sentences on what it tells of the data.

    Raises:
        ConfigurationError: the folder holds no run, or the run left no result.
    """
    folder = RunFolder(run)
    record = folder.read()
    params, schema = folder.read_result()
    buffers = folder.read_buffers()
    if not record.config.job.endswith(SEALED):
        raise ConfigurationError(f"{run} holds a run of {record.config.job}, which is no sealed job; name another run")
    name = Path(record.config.job).name
    sealed = {key: one for key, one in record.config.versions.items() if key == JOB_FILE}
    config = RunConfig(**{**{one: getattr(record.config, one) for one in SETTINGS}, "job": name, "versions": sealed})
    apart: dict[str, Any] = {"network": None, "compute": None, "cluster": None, "error": None, "notes": [], "lost": []}
    summary = msgspec.structs.replace(record.summary, job=name, **apart)
    events = [event for event in record.events if isinstance(event, FIGURES)]
    sections = {
        CONFIG: config.to_toml().encode(),
        SUMMARY: msgspec.json.format(msgspec.json.encode(summary), indent=2),
        EVENTS: msgspec.json.Encoder().encode_lines(events),
        WEIGHTS: save({name: value.copy() for name, value in (_tensors(params, schema) | buffers).items()}),
    }
    kept = f" and {len(buffers)} buffers, such as running means of the data" if buffers else ""
    return sections, list(_told(record, events, f"{len(schema.entries)} trained tensors{kept}"))


def _tensors(params: FlatArray, schema: Schema) -> dict[str, FlatArray]:
    """Return the parameters by name; each has a first axis more if they are those of an ensemble."""
    return {
        entry.name: params[..., entry.offset : entry.offset + entry.size].reshape(*params.shape[:-1], *entry.shape)
        for entry in schema.entries
    }


def _told(record: Record, events: Sequence[Event], tensors: str) -> list[str]:
    """Return sentences on what a returned run tells of the data."""
    steps = sum(isinstance(event, StepEvent) for event in events)
    evaluations = sum(isinstance(event, EvaluationEvent) for event in events)
    config = record.config
    facts = ", ".join(f"{name} {value}" for name, value in config.facts.items()) or "none"
    return [
        f"{tensors}, which may memorize samples",
        f"the loss of each worker's batch at {steps} steps, with the times and bytes of the step",
        f"loss and {config.metric} on the test data at {evaluations} evaluations",
        f"the number of samples used, {record.summary.samples}, and how they were split: {config.split}",
        f"fingerprints of the data, such as of names, sizes and samples of its files: {facts}",
        "the digest of the sealed job",
        f"the settings of the run: {config.workers} workers, {config.strategy}, {config.steps} steps",
    ]


def written(sections: Mapping[str, bytes], names: Mapping[str, str], out: Path) -> None:
    """Write a returned run to a folder, the weights under the sender's own names; refuse damaged sections.

    `names`: name in the sealed job → the sender's name; other names stay.
    """
    if missing := set(SENT) - set(sections):
        raise ConfigurationError(f"the returned run lacks {', '.join(sorted(missing))}; ask its sender for it again")
    try:
        weights = load(sections[WEIGHTS])
        config = RunConfig.from_toml(sections[CONFIG].decode(), "the returned run")
    except (SafetensorError, ValueError, TypeError, LookupError, AttributeError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"the returned run is damaged: {error}; ask its sender for it again") from None
    archive.decoded(sections[SUMMARY], Summary, "the summary of the returned run")
    for line in sections[EVENTS].splitlines():
        archive.decoded(line, Event, "an event of the returned run")  # type: ignore[arg-type]
    if names and names.get(JOB_FILE) != config.versions.get(JOB_FILE):
        raise ConfigurationError(
            "the names must be those of the job that was trained, got those of another sealed file; give the file "
            "OUT.names that flockstep seal wrote beside it"
        )
    if out.exists():
        raise ConfigurationError(f"{out} exists; choose another folder with --out")
    write_whole(out / WEIGHTS, save({names.get(name, name): value for name, value in weights.items()}))
    write_whole(out / EVENTS, sections[EVENTS])
    write_whole(out / SUMMARY, sections[SUMMARY])
    write_whole(out / CONFIG, config.to_toml().encode())
