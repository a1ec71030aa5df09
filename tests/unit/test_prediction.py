"""flockstep bench prediction: ranks, what counts as a miss, the page; and predictions where the truth is known."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from flockstep.cli.app import run
from flockstep.costs.cluster import ClusterShape, Rates
from flockstep.errors import ConfigurationError, Interrupted, UnknownName
from flockstep.launchers.simulate import simulate
from flockstep.planning.calibrate import Calibration
from flockstep.planning.check import check
from flockstep.planning.fit import fit_records
from flockstep.planning.job_profile import task_of
from flockstep.records.config import RunConfig
from flockstep.strategies.base import Strategy
from flockstep_lab.bench import plots, prediction
from flockstep_lab.bench.prediction import Pair, Truth, predict, rank_correlation, steps_for

JOB = "softmax(features=200, train=256, test=64)"


def test_ranks_of_the_same_order_correlate_fully_and_reversed_ones_not_at_all() -> None:
    assert rank_correlation([1, 2, 3, 10], [0.1, 0.5, 0.6, 99]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 10], [9, 5, 4, 0]) == pytest.approx(-1)


def test_ranks_by_hand() -> None:
    assert rank_correlation([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(1 - 6 * 4 / (5 * 24))
    assert rank_correlation([1, 1, 2], [1, 2, 3]) == pytest.approx(3**0.5 / 2)  # the ties have rank 0.5 each


def test_nothing_to_rank() -> None:
    assert rank_correlation([1, 1], [1, 2]) is None
    assert rank_correlation([], []) is None
    with pytest.raises(ConfigurationError, match="must have the same length"):
        rank_correlation([1], [])


@pytest.mark.parametrize(("seconds", "steps"), [(2.4, 14), (0.1, 53), (0.001, 80)])
def test_runs_have_steps_that_divide_into_five_spans_of_four_unless_they_are_slow(seconds: float, steps: int) -> None:
    assert steps_for(seconds) == steps
    assert steps == prediction.FEW or (steps - max(1, steps // 4)) % 20 == 0


def truth(*errors: float) -> Truth:
    measured = [0.01 * 2**place for place in range(len(errors))]
    pairs = [
        Pair(f"strategy {place}", "1gbit", 80, one * (1 + error), one, one, one)
        for place, (one, error) in enumerate(zip(measured, errors, strict=True))
    ]
    return Truth(JOB, 4, 2, 0.9, (), tuple(pairs))


def test_combinations_are_drawn_by_their_seed() -> None:
    one, again, other = (prediction.drawn(60, seed) for seed in (1, 1, 2))
    assert one == again != other
    pairs = [(key, pair) for key, mine in one.items() for pair in mine]
    assert len(set(pairs)) == 60
    assert len(prediction.DRAWN) == 20
    for text in prediction.DRAWN:
        for workers in prediction.NUMBERS:
            Strategy.parse(text).check(workers)
    whole = prediction.together([truth(0.1), truth(-0.3, 0.0)])
    assert len(whole.pairs) == 3
    assert [one.holds for one in whole.pairs] == [True, False, True]
    assert whole.misses[0].startswith(f"strategy 0, 4 × {JOB} at 1gbit: -30%")


def test_an_interruption_keeps_the_combinations_measured_before(
    fitted: ClusterShape, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupts(*_arguments: object) -> Pair:
        if len(measured) == 8:
            raise Interrupted("terminated; everything computed so far is in the record")
        measured.append(Pair(f"strategy {len(measured)}", "1gbit", 80, 1.0, 1.0, 1.0, 1.0))
        return measured[-1]

    measured: list[Pair] = []
    monkeypatch.setattr(prediction.namespaces, "require", lambda: None)
    monkeypatch.setattr(prediction, "calibrated", lambda *_: prediction.Known(Calibration(fitted, ()), 1.0))
    monkeypatch.setattr(prediction, "_pair", interrupts)
    sizes = [len(pairs) for pairs in prediction.drawn(12, 1).values()]
    assert len(sizes) > 1
    assert run(["bench", "prediction", "--draw", "12", "--seed", "1"]) == 130
    out, err = capsys.readouterr()
    assert [name for name in ("strategy 0", "strategy 7") if name in out] == ["strategy 0", "strategy 7"]
    assert "8 of 8 within 20%" in out
    assert "interrupted after" in err


def test_misses_are_told() -> None:
    assert truth(0.1, -0.19, 0.0).misses == []
    (miss,) = truth(0.1, -0.3, 0.0).misses
    assert miss == "strategy 1 at 1gbit: -30%, more than 20%"
    said = truth(9.0, 0.0, -0.9).misses
    assert len(said) == 4
    assert said[-1].startswith("the rank correlation for all is -")


def test_what_is_printed_and_drawn(tmp_path: Path) -> None:
    found = truth(0.1, -0.3, 0.0)
    assert "2 of 3 within 20%\n  strategy 1" in found.sentences()[-1]
    assert found.document()["pairs"][1]["error"] == pytest.approx(-0.3)
    drawing = plots.of_prediction(found)
    (points,) = [one for one in drawing["data"] if one.get("name") == "1gbit"]
    assert points["x"] == [one.measured for one in found.pairs]
    assert points["y"] == [one.predicted for one in found.pairs]
    assert drawing["layout"]["xaxis"]["type"] == drawing["layout"]["yaxis"]["type"] == "log"


def test_refused_without_root(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert run(["bench", "prediction"]) != 0
    said = capsys.readouterr().err
    assert "root" in said
    assert "Traceback" not in said


def test_what_is_not_there_is_refused_before_anything_is_run() -> None:
    with pytest.raises(UnknownName, match="no strategy is called 'no_such'"):
        prediction.measure(["no_such"])
    with pytest.raises(ConfigurationError, match="bandwidth"):
        prediction.measure(["ps"], ["20"[:0]])


def test_two_records_tell_what_a_byte_takes_and_the_latency(fitted: ClusterShape, tmp_path: Path) -> None:
    """The links let 9/10 through; a latency that the probe has not seen shows on the quick one."""
    texts = ("20mbit", "1gbit")
    ends = [(record(tmp_path / text, "all_reduce", text, latency=3e-4, workers=2), CARDS[text]) for text in texts]
    probed = Calibration(replace(fitted, wires=(replace(fitted.wires[0], latency=1e-5),)), ())
    known = prediction.Known.of(probed, *ends)
    (wire,) = known.at(40e6).wires
    assert wire.bandwidth == pytest.approx(0.9 * 40e6, rel=0.03)
    assert wire.latency == pytest.approx(3e-4, rel=0.1)


def test_cores_spend_more_on_each_byte_of_a_slow_card(fitted: ClusterShape) -> None:
    calibration = Calibration(replace(fitted, copy=7e-9), ())
    known = prediction.Known(calibration, 1.0, ((10e6, 3e-9), (100e6, 1.2e-9)))
    assert [known.at(one).copy for one in (10e6, 20e6, 100e6)] == pytest.approx([3e-9, 2e-9, 1.2e-9])
    assert prediction.Known(calibration, 1.0).at(20e6).copy == 7e-9
    assert prediction.Known(calibration, 1.0, ((10e6, 3e-9), (100e6, 0.0))).at(1e9).copy == 0.0


@pytest.mark.full
def test_a_latency_of_the_probe_is_the_least_and_frames_are_the_least_share(
    fitted: ClusterShape, tmp_path: Path
) -> None:
    ends = [(record(tmp_path / text, "all_reduce", text, latency=3e-4), CARDS[text]) for text in ("20mbit", "1gbit")]
    (wire,) = fitted.wires
    late = Calibration(replace(fitted, wires=(replace(wire, latency=1e-3),)), ())
    assert prediction.Known.of(late, *ends).at(40e6).wires[0].latency == 1e-3
    assert prediction.Known.of(late, (ends[0][0], 2e6), ends[1]).share == prediction.FRAMES


def test_codecs_to_measure_are_those_of_steps() -> None:
    assert prediction.coded(["all_reduce", "ps(codec=qsgd)", "powersgd(rank=3)", "sgp"]) == [
        str(Strategy.parse(text).coding) for text in ("powersgd(rank=3)", "ps(codec=qsgd)")
    ]


CARDS = {"20mbit": 2.5e6, "100mbit": 12.5e6, "1gbit": 125e6}


def record(folder: Path, strategy: str, bandwidth: str, latency: float = 0.0, workers: int = 4) -> Path:
    """A run in virtual time, over links that messages share and that let 9/10 of their bandwidth through."""
    network = f"fair_link(bandwidth={0.9 * CARDS[bandwidth]}, latency={latency})"
    config = RunConfig(
        kind="simulate",
        job=JOB,
        strategy=strategy,
        workers=workers,
        steps=53,
        network=network,
        compute="lognormal(0.0002, sigma=0.3)",
    )
    simulate(config, folder)
    return folder


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> ClusterShape:
    folder = record(tmp_path_factory.mktemp("record") / "run", "all_reduce", "100mbit")
    return fit_records([folder]).shape


STRATEGIES = ("ps", "ps(consistency=asynchronous)", "scatter_reduce", "dpsgd(topology=ring)", "local_sgd(period=4)")


def test_one_record_predicts_other_strategies_at_another_bandwidth(fitted: ClusterShape, tmp_path: Path) -> None:
    (wire,) = fitted.wires
    assert wire.fair
    assert wire.bandwidth == pytest.approx(0.9 * 12.5e6, rel=0.03)
    slower = replace(fitted, wires=(replace(wire, bandwidth=wire.bandwidth / 5),))
    found = [check(record(tmp_path / str(i), one, "20mbit"), slower) for i, one in enumerate(STRATEGIES)]
    assert {one.source for one in found} == {"rehearsal"}
    assert [one.error for one in found] == pytest.approx([0.0] * 5, abs=0.1)
    took = [one.measured.seconds for one in found]
    rank = rank_correlation([one.predicted.seconds for one in found], took)
    assert rank is not None
    assert rank >= 0.9


def test_a_prediction_for_the_wrong_bandwidth_is_noticed(fitted: ClusterShape, tmp_path: Path) -> None:
    assert check(record(tmp_path / "run", "ps", "20mbit"), fitted).error < -0.5


def test_a_rehearsal_knows_of_the_time_that_coding_takes(fitted: ClusterShape) -> None:
    task, text = task_of(JOB), "all_reduce(codec=half)"
    slow = Rates({"half": 1e5}, {"half": 1e5}, {"sgd": 1e12})
    quick = Rates({"half": 1e12}, {"half": 1e12}, {"sgd": 1e12})
    took = [predict(replace(fitted, rates=rates), task, text, 4, 20).seconds for rates in (quick, slow)]
    assert took[1] - took[0] == pytest.approx(5 * task.elements / 1e5, rel=0.01)  # one encoding, four decodings


@pytest.mark.parametrize("strategy", ["ps"])
def test_links_that_take_turns_would_predict_too_little(strategy: str, fitted: ClusterShape, tmp_path: Path) -> None:
    in_turn = replace(fitted, wires=tuple(replace(one, fair=False) for one in fitted.wires))
    folder = record(tmp_path / "run", strategy, "100mbit")
    assert check(folder, in_turn).error < -0.15
    assert abs(check(folder, fitted).error) < 0.05
