"""Every command that prints a table, in terminals of 60 and 80 columns: lines fit, and no word is broken."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len

from flockstep.cli.app import run
from flockstep.report.formatting import pieces
from support.matrix import few

FAST = ["--steps", "8", "--compute", "constant(0.01)", "-n", "4"]
PLAN = shlex.split("plan softmax --budget 0 --cluster lab-1gbit -n 4 -s all_reduce -s 'ps(consistency=ssp(3))'")
COMMANDS = {
    "simulate": ["simulate", "softmax", "-s", "ps(consistency=ssp(3))", *FAST, "--out", "run", "--overwrite"],
    "compare": ["compare", "softmax", "--simulate", "-s", "all_reduce", "-s", "local_sgd(period=4)", *FAST],
    "compare with seeds": [
        *["compare", "softmax", "--simulate", "-s", "all_reduce", "-s", "local_sgd(period=4)", *FAST],
        *["--seeds", "2", "--lr-grid", "0.1,0.3"],
    ],
    "list": ["list"],
    "list of a kind": ["list", "codecs"],
    "systems": ["systems"],
    "layers": ["layers", "vgg-a"],
    "layouts": ["layouts"],
    "claims": ["reproduce"],
    "claim": ["reproduce", "A15"],
    "plan": PLAN,
    "plan that is cut": ["plan", "softmax", "--budget", "0", "--cluster", "lab-1gbit", "-n", "2"],
    "trials": [*PLAN, "--budget", "60", "--simulate", "--keep", "trials"],
    "check": ["plan", "softmax", "--check", "checked"],
    "codecs": ["bench", "codecs", "half", "topk(0.01)", "--elements", "1000", "--rounds", "1"],
    "simulator": ["bench", "simulator", "-n", "2", "--rounds", "1", "--steps", "2"],
}
PATHS = ("record:", "report:", "runs")


@pytest.fixture(scope="module", autouse=True)
def _in_a_folder_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("narrow"))
    run(["simulate", "softmax", "-s", "gossip", *FAST, "--out", "checked"])
    yield
    os.chdir(before)


@pytest.mark.parametrize("width", few([60, 80], 60))
@pytest.mark.parametrize("name", COMMANDS)
def test_tables_fit(name: str, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    said = {}
    for columns in (width, 400):
        monkeypatch.setenv("COLUMNS", str(columns))
        capsys.readouterr()
        assert run(COMMANDS[name]) == 0
        said[columns] = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(PATHS)]
    known = words(said[400]) | {"Left", "out", "to", "fit", "columns"}
    known |= {word.removesuffix("(") for word in known}  # names whose arguments are left out
    assert max(map(cell_len, said[width])) <= width
    assert words(said[width]) - known <= left_out(said[width])


def words(shown: list[str]) -> set[str]:
    """What stands on the lines, in the parts between which lines may end; figures may differ from run to run."""
    parts = {part.strip(" ,.:") for chunk in " ".join(shown).split() for part in pieces(chunk)}
    return {part for part in parts if part.strip("─") and not any(letter.isdigit() for letter in part)}


def left_out(shown: list[str]) -> set[str]:
    """The words that name the columns that are left out."""
    _, told, names = " ".join(shown).partition("Left out to fit")
    return words([names]) if told else set()
