"""Tables in the cells of a notebook, and lists in a narrow terminal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flockstep.cli.app import run
from flockstep.experiments.comparison import Comparison
from flockstep.experiments.single import RunResult
from flockstep.frameworks.base import Job
from flockstep.records import RunConfig, summarize
from flockstep.report.medians import RepeatedRuns
from flockstep.report.table import table

EVIL = "<script>x</script>"
SAFE = "&lt;script&gt;x&lt;/script&gt;"
CONFIG = RunConfig(kind="simulate", job="softmax", strategy=f"bsp{EVIL}", workers=2)
SUMMARY = summarize(CONFIG, [], "failed", f"worker 0{EVIL}", [f"a note{EVIL}"])
RUN = RunResult(Path(f"runs/{EVIL}"), CONFIG, SUMMARY)
COMPARISON = Comparison((RUN,), (RepeatedRuns((SUMMARY,)),), (RepeatedRuns((SUMMARY,)),), Path(f"{EVIL}.html"), False)


@pytest.mark.parametrize(("shown", "texts"), [(RUN, 4), (COMPARISON, 4)], ids=["run", "comparison"])
def test_a_cell_shows_the_rows_of_the_terminal_table_escaped(shown: RunResult | Comparison, texts: int) -> None:
    found = shown._repr_html_()
    (row,) = table([SUMMARY]).rows
    assert all(f">{text.replace(EVIL, SAFE)}</td>" in found for text in row)
    assert EVIL not in found
    assert found.count(SAFE) == texts


def test_a_job_shows_its_settings() -> None:
    job = Job(model=lambda: None, data=lambda: None, optimizer="sgd(lr=0.1)", name=EVIL)  # type: ignore[arg-type, return-value]
    found = replace(job, target=0.9)._repr_html_()
    assert f"<tr><th>name</th><td>{SAFE}</td></tr>" in found
    assert "<tr><th>target</th><td>0.9</td></tr>" in found


def test_a_list_of_a_kind_shows_names_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With their arguments, half of the width is left for what the components are."""
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["list", "strategies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines[2:] if line and not line.startswith((" ", "Left"))]
    assert {"all_reduce", "easgd", "ps"} <= set(names)
    assert not any(mark in name for name in names for mark in "(=")
    assert "flockstep list all_reduce shows" in " ".join(lines)


def test_a_description_fills_the_lines_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["list", "topk"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("With `sampled`"))
    assert all(60 < len(line) <= 80 for line in lines[start : start + 6])
