"""`flockstep layouts`: the figures, what is refused, and the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flockstep.cli.app import run
from flockstep.collectives.layouts import LAYOUTS
from flockstep.errors import ConfigurationError
from flockstep.report.layouts import SPEEDS, WORKERS, Delays, ModelSize, layouts_page, picture, speed

VGG = ModelSize("VGG-A", 132_900_000, 4 * 132_900_000)
DELAYS = Delays((VGG,), 16, 1.25e9)


def test_the_figures_are_those_of_the_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["layouts", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["seconds"]) == ["vgg-a", "resnet-152", "googlenet"]
    assert list(found["seconds"]["vgg-a"]) == list(LAYOUTS)
    assert f"{found['seconds']['vgg-a']['ring']:.3f}" == "1.091"
    assert f"{found['seconds']['resnet-152']['naive server']:.3f}" == "6.612"  # 60,192,808 parameters, not 60.2 M


def test_ten_times_the_bandwidth_is_less_than_ten_times_as_fast() -> None:
    quick = Delays((VGG,), 16, 1.25e10)
    for name in LAYOUTS:
        assert DELAYS.seconds(VGG, name) / 10 < quick.seconds(VGG, name) < DELAYS.seconds(VGG, name)


def test_a_line_for_each_layout_in_each_panel() -> None:
    drawn = picture(Delays((VGG, VGG), 16, 1.25e9))
    assert len(drawn["data"]) == 2 * 2 * len(LAYOUTS)
    assert sum(line["showlegend"] for line in drawn["data"]) == len(LAYOUTS)
    marks = {(line["line"]["color"], line["marker"]["symbol"]) for line in drawn["data"]}
    assert len(marks) == len(LAYOUTS)
    assert {len(line["x"]) for line in drawn["data"]} == {len(WORKERS), len(SPEEDS)}


def test_the_page_says_in_words_and_tables_what_it_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "new" / "layouts.html"
    assert run(["layouts", "vgg-a", "-n", "8", "--bandwidth", "1gbit", "--out", str(page)]) == 0
    said = capsys.readouterr().out
    assert "8 workers with links of 1 Gbit/s" in " ".join(said.split())
    assert said.rstrip().endswith("layouts.html")
    text = page.read_text("utf-8")
    assert all(name in text for name in LAYOUTS)
    assert "1,024" in text
    assert "figure 14" in text


def test_names_are_harmless() -> None:
    text = layouts_page(Delays((ModelSize("<script>alert(1)</script>", 1, 4),), 2, 1e6)).render()
    assert "<script>alert" not in text


def test_bandwidths_in_words() -> None:
    assert [speed(one) for one in (1.25e3, 1.25e6, 1.24999e8, 1.25e9, 1.25e10, 1.25e11)] == [
        "10 kbit/s", "10 Mbit/s", "1 Gbit/s", "10 Gbit/s", "100 Gbit/s", "1 Tbit/s"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-n", "0"], "layouts need >= 1 worker, got 0"),
        (["--bandwidth", "fast"], "--bandwidth must be a number"),
        (["--bandwidth", "100"], "--bandwidth must have a unit, got '100'; write it like '1gbit'"),
        (["vgg"], "did you mean 'vgg-a'?"),
        (["--out", "picture.png"], "--out must be an .html file"),
        (["vgg-a"] * 5, "layouts need 1 to 4 models, got 5"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["layouts", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_layout_of_no_model_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="layouts need 1 to 4 models, got 0"):
        Delays((), 1, 1.0)
