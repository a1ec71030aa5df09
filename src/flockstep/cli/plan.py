"""`flockstep plan`: what every strategy would do on a cluster, and which to take; or whether that was right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flockstep.cli import options as o
from flockstep.cli import show
from flockstep.errors import ConfigurationError

if TYPE_CHECKING:
    from flockstep.planning.advice import Advice
    from flockstep.planning.check import Check
    from flockstep.planning.plan import Outlook

Named = Annotated[
    str | None, typer.Option("--cluster", "-c", help="laptop, lab-1gbit, edge, …, or a TOML file, as of calibrate.")
]
Needs = Annotated[
    list[str] | None,
    typer.Option("--need", help="unbalanced, reproducible, elastic, private or slow-links; repeatable."),
]


def plan(
    what: Annotated[str, typer.Argument(help="A job, a file with job(), or a reference model such as vgg-a.")],
    cluster: Named = None,
    workers: Annotated[int | None, typer.Option("--workers", "-n", help="Workers (default: all it has).")] = None,
    need: Needs = None,
    strategy: Annotated[
        list[str] | None, typer.Option("--strategy", "-s", help="Only these; repeatable (default: all).")
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", "-b", help="Samples per gradient (default: the job's).")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also rehearse strategies without a closed form.")] = False,
    record: Annotated[
        list[Path] | None, typer.Option("--check", help="Compare with the record of a run of this job; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also draw it, as one HTML file.")] = None,
    as_json: o.Json = False,
) -> None:
    """Predict every strategy on a cluster before anything is run, and say which to take."""
    if out is not None and out.suffix != ".html":
        raise ConfigurationError(f"--out must be an .html file, got {str(out)!r}; give it that ending")
    if record:
        _check(what, cluster, record, as_json)
        return
    from flockstep.planning.advice import advise

    outlook = _outlook(what, cluster or "laptop", workers, batch, tuple(strategy or ()), everything)
    advice = advise(outlook, tuple(need or ()))
    if out is not None:
        from flockstep.planning.page import write_plan

        write_plan(outlook, advice, out)
    if as_json:
        show.json({**outlook.document(), "advice": advice.document()})
        return
    page = show.page()
    page.print(_table(outlook, advice))
    _say(page, outlook, advice)
    if out is not None:
        print(out)


def _outlook(
    what: str, cluster: str, workers: int | None, batch: int | None, strategies: tuple[str, ...], everything: bool
) -> Outlook:
    from flockstep.costs.cluster_reading import load_cluster
    from flockstep.planning.plan import plan as predict
    from flockstep.planning.task import task_of

    shape = load_cluster(cluster)

    def run(say: Callable[[str], None]) -> Outlook:
        say(f"reading {what}")
        task = task_of(what, batch)
        return predict(task, shape, workers, strategies=strategies, rehearse=everything, say=say)

    if not show.console.is_terminal:
        return run(lambda what: None)
    with show.console.status("starting") as status:
        return run(lambda what: status.update(escape(what)))


def _table(outlook: Outlook, advice: Advice) -> Table:
    from flockstep.planning.words import HEADINGS, cells

    title = f"{outlook.task.name} on {outlook.workers} workers of {outlook.site.cluster.name}"
    table = Table(title=escape(title), box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for place, heading in enumerate(HEADINGS):
        table.add_column(heading, no_wrap=place > 0, justify="left" if place in (0, len(HEADINGS) - 1) else "right")
    for found in outlook.prospects:
        style = "bold" if found is advice.choice else ""
        table.add_row(*(escape(text) for text in cells(outlook, found)), style=style)
    return table


def _say(page: Console, outlook: Outlook, advice: Advice) -> None:
    from flockstep.planning.words import scaling_sentence, unplanned

    for sentence in advice.sentences:
        page.print(escape(sentence), style="bold", highlight=False)
    for heading, sentences in (
        ("why", advice.reasons),
        ("what would change this", advice.changes),
        ("scaling", tuple(map(scaling_sentence, outlook.curves))),
        ("not in these figures", (*outlook.left_out, *unplanned(outlook))),
    ):
        if sentences:
            page.print(f"{heading}:", highlight=False)
        for sentence in sentences:
            page.print(escape(f"  - {sentence}"), highlight=False)


def _check(what: str, cluster: str | None, records: list[Path], as_json: bool) -> None:
    from flockstep.costs.cluster_reading import load_cluster
    from flockstep.planning.check import check
    from flockstep.records.folder import RunFolder

    shape = None if cluster is None else load_cluster(cluster)
    for folder in records:
        job = RunFolder(folder).read_config().job
        if job != what:
            raise ConfigurationError(f"{folder} must be of {what}, got {job}; write flockstep plan {job} --check …")
    found = [check(folder, shape) for folder in records]
    if as_json:
        show.json([one.document() for one in found])
    else:
        show.page().print(_checks(found))


def _checks(found: list[Check]) -> Table:
    from flockstep.planning.words import CHECK_HEADINGS, check_cells

    table = Table(title="predicted and measured", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for place, heading in enumerate(CHECK_HEADINGS):
        table.add_column(heading, no_wrap=place > 0, justify="left" if place == 0 else "right")
    for one in found:
        table.add_row(*(escape(text) for text in check_cells(one)))
    return table
