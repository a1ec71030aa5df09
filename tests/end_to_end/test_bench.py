"""flockstep bench: what it prints, writes and draws; how fast anything is, is not for tests to say."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flockstep.arrays.schema import FlatArray
from flockstep.cli.app import run
from flockstep.collectives.table import read_table
from flockstep.frameworks.base import Evaluation
from flockstep.frameworks.numpy import NumpyEngine
from flockstep_lab.bench import collectives, simulator, transport
from flockstep_lab.bench.implementation import BenchProcess, BenchWorker, Implementation, Summing
from flockstep_lab.bench.interleaved import Measurement, measure_interleaved
from flockstep_lab.cli.bench import LEGEND, rows_of
from support.matrix import few


def outcome(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = run(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.full
def test_collectives_says_what_each_took_or_lacks_and_saves_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, picture = tmp_path / "measured.toml", tmp_path / "rates.html"
    arguments = ["bench", "collectives", "-n", "2", "--sizes", "4096,65536", "-r", "2", "--json"]
    start = time.perf_counter()
    code, out, err = outcome([*arguments, "--save", str(table), "--out", str(picture)], capsys)
    wall = time.perf_counter() - start
    assert code == 0, err
    rows: list[dict[str, Any]] = json.loads(out)
    for row in rows:
        assert bool(row["seconds"]) != bool(row["missing"]), row
        assert row["seconds"] is None or 0 < row["seconds"] < wall
    named = {row["implementation"] for row in rows}
    assert {*collectives.SHOWN, *collectives.candidates()} == named
    assert {(row["implementation"], row["bytes"]) for row in rows} == {
        (implementation, size) for implementation in named for size in (4096, 65536)
    }
    done = {row["implementation"] for row in rows if not row["missing"]}
    assert set(collectives.candidates()) <= done
    measured = read_table(str(table))
    assert {(one.collective, one.workers, one.bytes) for one in measured} == {
        (name, 2, size) for name in collectives.candidates() for size in (4096, 65536)
    }
    assert "plotly" in picture.read_text("utf-8")


@pytest.mark.skipif(sys.platform != "linux", reason="memory that processes share is Linux's")
def test_shared_memory_adds_up_in_place_and_elsewhere() -> None:
    figures = collectives.measure(("shared memory", "shared memory, ordinary arrays"), (2,), (4096, 1 << 18), 1)
    assert [one.missing for one in figures] == [""] * 4


@pytest.mark.parametrize("peer", few(["gloo", "openmpi"], "openmpi"))
def test_a_peer_takes_part_where_it_is_installed(peer: str) -> None:
    implementation = next(one for one in collectives.IMPLEMENTATIONS if one.name == peer)
    if any(importlib.util.find_spec(module) is None for module in implementation.modules):
        assert implementation.missing.startswith("pip install ")
        pytest.skip(f"{peer} is not installed")
    (figure,) = collectives.measure((peer,), (2,), (4096,), 1)
    if peer == "openmpi" and figure.seconds is None:
        pytest.skip(f"OpenMPI does not start here: {figure.missing}")
    assert figure.seconds is not None, figure.missing


def test_transport_has_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outcome(["bench", "transport", "-r", "1", "--sizes", "65536", "--json"], capsys)
    assert code == 0, err
    rows = json.loads(out)
    assert [row["implementation"] for row in rows] == [
        implementation.name for implementation in transport.IMPLEMENTATIONS
    ]
    assert all(row["seconds"] or row["missing"] for row in rows)
    assert {"ipc", "tcp", "raw tcp socket", transport.COPY} <= {row["implementation"] for row in rows if row["seconds"]}


def test_a_table_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(["bench", "collectives", "-n", "2", "--sizes", "4096", "-r", "1", "-i", "ring"], capsys)
    assert code == 0
    assert "ring" in out
    assert "GB/s" in out


def test_a_noisy_row_is_marked() -> None:
    quiet, noisy = (Measurement("ring", 2, 4096, 1e-3, 0.9e-3, high, 5) for high in (1.1e-3, 2e-3))
    first, second = rows_of([quiet, noisy], "openmpi")
    assert "~" not in first[4]
    assert second[4].endswith(" ~")
    assert "~: the quartiles" in LEGEND


def test_codecs_are_measured_beside_a_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "codecs.html"
    arguments = ["bench", "codecs", "identity", "half", "--elements", "4096", "-r", "2", "--out", str(picture)]
    code, out, err = outcome([*arguments, "--json"], capsys)
    assert code == 0, err
    rows = {row["codec"]: row for row in json.loads(out)}
    assert rows["identity"]["bits"] == 32
    assert rows["half"]["bits"] == 16
    assert rows["numpy.copyto"]["encode"] == 1
    for name in ("identity", "half"):
        assert all(rows[name][what] > 0 for what in ("encode", "encode_residual", "add_decoded"))
    assert "numpy.copyto" in picture.read_text("utf-8")
    code, out, _ = outcome(arguments, capsys)
    assert code == 0
    assert "bits an element" in out


def test_the_simulator_is_measured_beside_a_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "simulator.html"
    arguments = ["bench", "simulator", "-n", "4", "-r", "1", "--steps", "3", "--out", str(picture)]
    code, out, err = outcome([*arguments, "--json"], capsys)
    assert code == 0, err
    rows = json.loads(out)
    assert [row["strategy"] for row in rows[:2]] == ["plain loop", "batched call"]
    assert (rows[0]["to_loop"], rows[1]["to_batched"]) == (1, 1)
    assert [row["to_loop"] for row in rows] == pytest.approx([row["rate"] / rows[0]["rate"] for row in rows])
    assert all(row["events"] >= row["rate"] for row in rows[2:]), "a step is an event on the record"
    assert "plain training loop" in picture.read_text("utf-8")
    assert outcome(arguments, capsys)[0] == 0


def test_the_simulator_is_measured_without_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain loop that the simulation is compared with evaluates nothing."""
    evaluated: list[int] = []
    evaluate = NumpyEngine.evaluate

    def counted(engine: NumpyEngine, params: FlatArray, ranks: Sequence[int]) -> Evaluation:
        evaluated.extend(ranks)
        return evaluate(engine, params, ranks)

    monkeypatch.setattr(NumpyEngine, "evaluate", counted)
    assert simulator.measure(["gossip", "asgd"], [4], rounds=1, steps=3)
    assert evaluated == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["collectives", "-i", "rnig"], "no implementation is called 'rnig'; did you mean 'ring'?"),
        (["collectives", "-n", "1"], "workers must be whole numbers >= 2"),
        (["collectives", "--sizes", "many"], "sizes must be whole numbers >= 4"),
        (["transport", "-r", "0"], "rounds must be >= 1, got 0; 20 is usual"),
        (["codecs", "haf"], "no codec is called 'haf'; did you mean 'half'?"),
        (["codecs", "--elements", "0"], "elements must be >= 1, got 0; 4194304 is usual"),
        (["simulator", "-n", "0"], "replicas must be whole numbers >= 1"),
        (["simulator", "--steps", "0"], "steps must be >= 1, got 0; 20 is usual"),
        (["simulator", "--workload", "softmaxx"], "no workload is called 'softmaxx'; did you mean 'softmax'?"),
        (["prediction", "--bandwidths", "1gbit,20"], "bandwidths must have a unit, got '20'; write it like '100mbit'"),
        (["prediction", "--rounds", "0"], "rounds must be >= 1, got 0; 1 is usual"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outcome(["bench", *arguments], capsys)
    assert (code, out) == (2, "")
    assert sentence in err


class _Miscounts(Summing):
    def __init__(self, place: BenchProcess):
        self.workers = place.workers

    def all_reduce(self, array: Any) -> None:
        array += 7


def _lacks(place: BenchProcess) -> BenchWorker:
    raise AssertionError("it cannot run")


IMPLEMENTATIONS = (
    Implementation("miscounts", _Miscounts),
    Implementation("lacks", _lacks, ("nowhere",), ("nowhere_to_be_found",)),
)


def test_a_wrong_sum_and_a_lacking_package_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    found: list[Measurement] = measure_interleaved(Path(__file__).stem, IMPLEMENTATIONS, 2, (64,), 1)
    assert {one.implementation: one.seconds for one in found} == {"miscounts": None, "lacks": None}
    said = {one.implementation: one.missing for one in found}
    assert said["lacks"] == "pip install nowhere"
    assert "sums 2 ones to 8" in said["miscounts"]


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "nsenter"))), reason="needs root")
def test_prediction_runs_processes_on_links_and_says_how_far_off_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "prediction.html"
    arguments = ["bench", "prediction", "-s", "scatter_reduce", "--bandwidths", "1gbit", "--out", str(picture)]
    start = time.perf_counter()
    code, out, err = outcome([*arguments, "--json"], capsys)
    wall = time.perf_counter() - start
    assert code == 0, err
    said = json.loads(out)
    (pair,) = said["pairs"]
    assert (pair["strategy"], pair["bandwidth"]) == ("scatter_reduce", "1gbit")
    assert 0 < pair["predicted"] < wall
    assert 0 < pair["measured"] < wall
    assert pair["error"] == pytest.approx(pair["predicted"] / pair["measured"] - 1)
    assert said["ranks"] == {"1gbit": None, "all": None}
    assert "plotly" in picture.read_text("utf-8")
    assert not list(Path("/sys/class/net").glob(f"fs{os.getpid()}*"))
