"""The commands of flockstep-lab, where it is installed and where not."""

from __future__ import annotations

import importlib.metadata

import pytest

from flockstep.cli.app import LAB, run


@pytest.mark.parametrize("name", LAB)
def test_every_command_of_the_lab_exists_where_it_is_installed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == 0
    assert f"flockstep {name}" in capsys.readouterr().out


def test_where_the_lab_is_missing_a_sentence_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **group: ())
    assert run(["bench", "codecs"]) == 2
    assert capsys.readouterr().err == (
        "flockstep: flockstep bench belongs to the distribution flockstep-lab, which is not installed; install it in "
        "a clone of the repository with pip install -e lab\n"
    )
    assert run(["--help"]) == 0
    assert "bench" in capsys.readouterr().out
