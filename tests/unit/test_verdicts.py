"""The page that keeps the last verdict on every claim."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flockstep.cli.app import run
from flockstep_lab.cli.reproduce import known
from flockstep_lab.cli.verdicts import BEGIN, END, HEAD, PAGE, row

ROOT = Path(__file__).parents[2]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / PAGE).parent.mkdir(parents=True)
    old = "| A5 | 2001-01-01 | holds | kept |\n| A6 | 2001-01-01 | falls short | old |\n"
    (tmp_path / PAGE).write_text(f"# Claims\n\n{BEGIN}{HEAD}{old}{END}\n\nthe rest\n")
    return tmp_path / PAGE


def test_a_verdict_takes_the_place_of_the_last_one(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reproduce", "A6", "--write", "--json"]) == 0
    (said,) = json.loads(capsys.readouterr().out)["claims"]
    text = page.read_text()
    assert text.startswith(f"# Claims\n\n{BEGIN}{HEAD}| A1 | – | not tried | |\n")
    assert "| A4 | – | not tried | |\n| A5 | 2001-01-01 | holds | kept |\n| A6 | 20" in text
    assert text.endswith(f"|\n{END}\n\nthe rest\n")
    (found,) = re.findall(r"^\| A6 \| (\d{4}-\d\d-\d\d) \| holds \| (.*) \|$", text, re.MULTILINE)
    assert found[0] > "2026-01-01"
    first = said["rows"][0]
    assert found[1].startswith(f"{first['what']} {first['ours']} ({first['published']})")


def test_what_falls_short_is_always_shown() -> None:
    rows = [{"what": f"w{i}", "published": 1.0, "ours": "a|b" if i == 8 else 2, "holds": i != 8} for i in range(9)]
    shown = row({"claim": "Z1", "holds": False, "rows": rows})
    assert shown.endswith("falls short | falls short: w8 a/b (1); w0 2 (1); w1 2 (1); w2 2 (1); 5 more that hold |")


def test_without_a_page_nothing_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["reproduce", "A6", "--write"]) == 2
    said = capsys.readouterr()
    assert "--write needs docs/explanation/claims.md" in said.err
    assert "A6:" not in said.err


def test_the_page_has_a_row_for_every_claim() -> None:
    text = (ROOT / PAGE).read_text("utf-8")
    assert text.count(BEGIN + HEAD) == text.count(END) == 1
    table = text.partition(BEGIN + HEAD)[2].partition(END)[0]
    assert re.findall(r"^\| (\w+) \|", table, re.MULTILINE) == known()
