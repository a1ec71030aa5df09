"""The terminal table of ranked runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from flockstep.records.config import RunConfig
from flockstep.records.summary import Summary
from flockstep.report import words
from flockstep.report.ranking import labels, rank

_STYLES = {"finished": "green", "interrupted": "yellow", "diverged": "red", "failed": "red"}


def headings(summary: Summary) -> list[tuple[str, str]]:
    """Column titles as pairs (full, narrow); all rows share the clock and the metric of `summary`."""
    unit = "s" if summary.clock == "real" else "virtual s"
    narrow = "the end" if summary.target is None else f"{summary.target:g}"
    full = narrow if summary.target is None else f"{summary.metric} {narrow}"
    return [
        ("#", "#"),
        ("strategy", "strategy"),
        (f"{unit} to {full}", f"s to\n{narrow}"),
        (f"final {summary.metric}", f"final\n{summary.metric}"),
        ("MB per worker sent / received", "MB sent/\nreceived"),
        ("staleness mean / max", "late\nmean/max"),
        ("utilization", "utili-\nzation"),
        ("divergence", "diver-\ngence"),
        ("complete", "com-\nplete"),
        ("status", "status"),
    ]


def cells(place: int, label: str, summary: Summary) -> list[str]:
    """One row as text, in the order of `headings`; a run that missed the target shows its whole time."""
    return [
        str(place) if summary.useful else words.NONE,
        label,
        _time(summary),
        words.metric(summary.final_metric),
        f"{words.number(summary.sent_bytes_per_worker / 1e6)}/{words.number(summary.received_bytes_per_worker / 1e6)}",
        words.staleness(summary),
        words.share(summary.utilization),
        words.number(summary.divergence),
        words.share(summary.completeness),
        summary.status,
    ]


def _time(summary: Summary) -> str:
    if summary.seconds_to_target is not None:
        return words.number(summary.seconds_to_target)
    return words.number(summary.seconds) if summary.target is None else f"> {words.number(summary.seconds)}"


def modeled(summaries: Sequence[Summary]) -> str:
    """The compute model that all simulated runs share, for a heading; if the runs differ, their labels name it."""
    laws = {summary.compute for summary in summaries}
    return f"a gradient takes {laws.pop()}" if len(laws) == 1 and None not in laws else "time is modeled"


def one_by_one(configs: Iterable[RunConfig]) -> list[str]:
    """Sentences about simulations that could not compute the gradients of several workers in one call."""
    said = {config.versions.get("gradients", "batched") for config in configs} - {"batched"}
    return [
        f"gradients were computed {how}; seconds are virtual, but the simulation takes longer" for how in sorted(said)
    ]


def table(summaries: Sequence[Summary]) -> Table:
    """The terminal table of ranked runs; without runs the table is empty.

    Raises:
        ConfigurationError: the runs cannot be compared.
    """
    ranked = rank(summaries)
    if not ranked:
        return Table(title="no runs", box=box.SIMPLE_HEAD)
    first = ranked[0]
    clock = "real seconds" if first.clock == "real" else f"VIRTUAL seconds: {escape(modeled(ranked))}"
    counts = " and ".join(str(n) for n in sorted({summary.workers for summary in ranked}))
    title = f"{escape(first.job)} on {counts} workers, {clock}"
    made = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=0,
    )
    for index, (_, heading) in enumerate(headings(first)):
        is_text = index in (1, 9)
        made.add_column(
            escape(heading),
            justify="left" if is_text else "right",
            overflow="fold",
            no_wrap=index != 1,
            min_width=12 if index == 1 else None,
        )
    for place, (label, summary) in enumerate(zip(labels(ranked), ranked, strict=True), 1):
        texts = [escape(text) for text in cells(place, label, summary)]
        texts[-1] = f"[{_STYLES[summary.status]}]{texts[-1]}[/]"
        made.add_row(*texts, style="bold" if place == 1 and summary.useful else None)
    return made
