"""Tables in narrow terminals: whole words, nothing dropped in silence, ties and clusters in the ranked table."""

from __future__ import annotations

import dataclasses
import io

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console

from flockstep.report.formatting import lines, pieces
from flockstep.report.ranking import places, rank
from flockstep.report.table import columns, table
from flockstep.report.terminal import TableColumn, TextTable
from support.records import RUNS, invent

WIDTHS = (40, 60, 80, 120)


def printed(made: TextTable, width: int) -> list[str]:
    page = io.StringIO()
    Console(file=page, width=width).print(made)
    return page.getvalue().splitlines()


def words(text: str) -> set[str]:
    return {part.strip() for chunk in text.split() for part in pieces(chunk)}


@pytest.mark.parametrize("width", WIDTHS)
def test_a_table_breaks_no_word_and_names_the_columns_that_are_left_out(width: int) -> None:
    made = table([invent(one).summary for one in RUNS])
    shown = printed(made, width)
    assert max(map(cell_len, shown)) <= width
    known = words(" ".join(printed(made, 400))) | words(made.left_out(width) or "")
    assert words(" ".join(shown)) <= known | {"─" * count for count in range(1, width + 1)}
    left = made.left_out(width) or ""
    assert len(made.shown(width)) + len([one for one in made.columns if one.heading in left]) == len(made.columns)
    assert " ".join(left.split()) in " ".join(" ".join(shown).split())
    assert (left == "") == (width == 120)


def test_the_columns_of_the_highest_rank_go_first_and_those_of_rank_0_stay() -> None:
    made = TextTable(
        [TableColumn("name", text=True), TableColumn("first", rank=1), TableColumn("second", rank=2)],
        [["a_name_of_one_word_only", "1", "2"]],
    )
    assert [made.shown(width) for width in (38, 37, 29, 10)] == [[0, 1, 2], [0, 1], [0], [0]]
    assert made.left_out(29) == "Left out to fit 29 columns: first, second."
    assert made.left_out(38) is None


def test_text_takes_what_figures_leave() -> None:
    made = TextTable(
        [TableColumn("strategy", text=True), TableColumn("seconds")],
        [["ps(consistency=ssp(3), codec=topk(0.01), feedback=residual)", "1.5"]],
    )
    assert [line.rstrip() for line in printed(made, 40)[2:]] == [
        "ps(consistency=ssp(3),               1.5",
        "codec=topk(0.01),",
        "feedback=residual)",
    ]
    assert len(printed(made, 80)) == 3


def test_lines_end_between_words() -> None:
    text = "ps(consistency=asynchronous, rule=delay_compensated(form='constant'))"
    assert lines(text, 30) == ["ps(consistency=asynchronous,", "rule=delay_compensated(form=", "'constant'))"]
    assert lines("a\nb", 10) == ["a", "b"]
    assert lines("", 10) == [""]


def test_markup_in_a_cell_stays_text() -> None:
    made = TextTable([TableColumn("name", text=True)], [["[red]x[/red]"]], title="[b]t[/b]")
    assert printed(made, 80)[0].strip() == "[b]t[/b]"
    assert printed(made, 80)[-1].strip() == "[red]x[/red]"


def test_the_place_of_a_run_counts_the_runs_that_were_certainly_faster() -> None:
    base = invent(RUNS[0]).summary
    between = [(0.0, 1.0), (0.9, 1.5), (1.0, 1.6), (1.5, 1.7), None]
    made = [
        msgspec.structs.replace(base, strategy=f"s{i}", seconds_to_target=one and one[1], seconds_to_target_range=one)
        for i, one in enumerate(between)
    ]
    assert places(rank(made)) == ["1=", "1=", "2=", "3=", "5"]
    wide = msgspec.structs.replace(made[3], seconds_to_target_range=(0.5, 3.0))
    assert places(rank([made[0], made[2], wide])) == ["1=", "2=", "1="], "a wide range may reach over the next place"
    failed = msgspec.structs.replace(made[1], status="failed")
    assert places(rank([made[0], failed])) == ["1", "2"]
    said = " ".join(printed(table(made[:2]), 100))
    assert "=: a tie, because the evaluations are too far apart" in said
    assert "=: a tie, because the ranges over the seeds overlap" in " ".join(printed(table(made[:2], seeds=3), 100))
    assert "tie" not in " ".join(printed(table([made[0], made[3]]), 100))


def test_real_seconds_of_one_run_each_are_said_to_vary() -> None:
    pair = [invent(one, kind="train").summary for one in RUNS[:2]]
    assert "--seeds" in " ".join(printed(table(pair), 200))
    assert "--seeds" not in " ".join(printed(table(pair, seeds=3), 200))
    assert "--seeds" not in " ".join(printed(table(pair[:1]), 200))


def test_the_heading_names_the_cluster_instead_of_its_times() -> None:
    record = invent(RUNS[0])
    law = f"empirical(({', '.join(['0.0012345'] * 50)}))"
    here = msgspec.structs.replace(record.summary, cluster="here", compute=law, network="link(1)")
    assert table([here]).title == "digits on 4 workers, VIRTUAL seconds: on the cluster here"
    there = msgspec.structs.replace(here, cluster="lab-1gbit")
    both = table([here, there])
    assert law not in both.title
    assert {row[1] for row in both.rows} == {"all_reduce · cluster here", "all_reduce · cluster lab-1gbit"}
    assert table([record.summary]).title.endswith("a gradient takes lognormal(0.005, 0.3)")


def test_every_column_has_a_heading_of_its_own() -> None:
    headings = [one.heading for one in columns(invent(RUNS[0]).summary)]
    assert len(set(headings)) == len(headings)
    assert "seconds to accuracy 0.95" in headings
    assert dataclasses.replace(columns(invent(RUNS[0], target=None).summary)[2]).heading == "seconds to the end"
