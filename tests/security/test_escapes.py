"""What a record of others holds is shown, not obeyed: by terminals, by browsers, and by what its numbers size."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from flockstep.cli.app import run
from flockstep.records import EventWriter, RunConfig, RunFolder, summarize
from flockstep.records.events import EvaluationEvent, Event, StepEvent
from flockstep.report.terminal import TableColumn, TextTable

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f<b onclick=x>&</b>"
SHOWN = "\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\x7f"
CONFIG = RunConfig(
    kind="train", job=f"digits{EVIL}", strategy=f"bsp{EVIL}", workers=1, metric=f"accuracy{EVIL}", target=0.5
)
EVENTS: list[Event] = [
    StepEvent(0.5, 0, 1, 0.5, 0.1, 0.2, 0.3, 10, 20, 1, 2),
    EvaluationEvent(0.5, 1, 10, 10.0, 0.7, 0.6, None),
    EvaluationEvent(0.9, 2, 20, 20.0, 0.6, 0.7, None),
]


def record(path: Path, config: RunConfig = CONFIG) -> Path:
    folder = RunFolder(path)
    with folder.created(config):
        with EventWriter(folder.events_file) as events:
            for event in EVENTS:
                events.write(event)
        folder.write_summary(summarize(config, EVENTS, "failed", f"worker 0 failed{EVIL}"))
    return path


def controls(text: str) -> list[str]:
    return re.findall(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)


def test_an_error_shows_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    """Names in a record become part of sentences."""
    assert run(["report", EVIL]) == 2
    out, err = capsys.readouterr()
    assert controls(out + err) == []
    assert SHOWN in err


def test_a_table_shows_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    from flockstep.cli import show

    show.page().print(TextTable([TableColumn(EVIL, text=True, note=EVIL)], [[EVIL]], title=EVIL, notes=[EVIL]))
    show.page().print(EVIL, markup=False, highlight=False)
    show.note(EVIL)
    out, err = capsys.readouterr()
    assert controls(out + err) == []
    assert (out.count("\\x1b]0;owned"), err.count(SHOWN)) == (6, 1)


def test_no_figure_of_a_report_holds_markup_of_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plotly reads its texts as markup: hovers, titles and names."""
    from flockstep.report import html

    drawn = list[str]()
    monkeypatch.setattr(html, "write", lambda page, path: drawn.append(page) or path)
    assert run(["report", str(record(tmp_path / "run")), "--out", str(tmp_path / "page.html")]) == 0
    (page,) = drawn
    assert "<b onclick" not in page
    assert "\\u003cb onclick" not in page, "a figure's text has a tag"
    assert "&lt;b onclick" in page
    capsys.readouterr()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("workers = 300000000", "workers must be <= 100000, got 300000000"),
        ('workers = 4\npartition = "pipeline(300000000)"', "over 300000000 workers, but the run had 4; correct"),
    ],
)
@pytest.mark.parametrize("command", ["report", "flight", "resume"])
def test_a_number_of_a_record_sizes_nothing(
    command: str, line: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loop over 300 million workers takes minutes and gigabytes."""
    file = record(tmp_path / "run", replace(CONFIG, job="digits", strategy="bsp")) / "config.toml"
    file.write_text(file.read_text().replace("workers = 1", line))
    (tmp_path / "run" / "summary.json").unlink()
    assert run([command, str(tmp_path / "run")]) == 2
    assert sentence in capsys.readouterr().err or (command, line[:11]) == ("resume", "workers = 4")
