"""`flockstep layouts`: the figures, and what is refused."""

from __future__ import annotations

import json

import pytest

from flockstep.cli.app import run
from flockstep.collectives.layouts import LAYOUTS
from flockstep.costs.reference import reference
from flockstep.errors import ConfigurationError
from flockstep.report.layers import Delays, speed

VGG = reference("vgg-a")
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
        (["vgg-a"] * 5, "layouts need 1 to 4 models, got 5"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["layouts", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_layout_of_no_model_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="layouts need 1 to 4 models, got 0"):
        Delays((), 1, 1.0)
