"""Calibration: laws, links and rates found again in what was simulated, and a real measurement that is a cluster."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flockstep.cli import planning as command
from flockstep.cli.commands import command_of
from flockstep.costs.cluster import ClusterShape, Rates
from flockstep.costs.cluster_file import load_cluster, read_cluster
from flockstep.errors import ConfigurationError
from flockstep.launchers.simulate import simulate
from flockstep.planning import calibrate
from flockstep.planning.calibrate import fit_law, measure_operations, measure_rates
from flockstep.planning.fit import fit_records, hosts_in
from flockstep.planning.job_profile import Site, task_of
from flockstep.records.config import RunConfig
from flockstep.records.events import HostsEvent, ScalarEvent, StepEvent
from flockstep.simulation.compute import ComputeModel, ConstantTime, Empirical, Lognormal
from flockstep.simulation.law import mean_of
from support.matrix import few

JOB = "softmax(features=900, train=256, test=16, batch=16)"
LAW = "lognormal(0.02, sigma=0.3)"
NETWORK = "link('50mbit', '3ms')"
BANDWIDTH, LATENCY = 6.25e6, 3e-3


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory):
    """Simulates a run of a strategy once; hands out its folder."""
    folder = tmp_path_factory.mktemp("records")

    def record(strategy: str, compute: str = LAW, network: str = NETWORK, workers: int = 4) -> Path:
        path = folder / str(abs(hash((strategy, compute, network, workers))))
        if not path.exists():
            config = RunConfig(
                kind="simulate",
                job=JOB,
                strategy=strategy,
                workers=workers,
                network=network,
                compute=compute,
                steps=40,
                evaluate_every=1000.0,
            )
            simulate(config, path)
        return path

    return record


@pytest.mark.parametrize(
    "strategy", few(["all_reduce", "ps(consistency=bsp)", "ps(consistency=asynchronous)"], "all_reduce")
)
def test_one_record_tells_the_law_and_one_of_latency_and_bandwidth(records, strategy: str) -> None:
    found = fit_records([records(strategy)], latency=LATENCY).shape
    assert isinstance(found.law, Lognormal)
    assert found.law.mean == pytest.approx(0.02, rel=0.05)
    assert found.law.sigma == pytest.approx(0.3, rel=0.1)
    assert found.wires[0].bandwidth == pytest.approx(BANDWIDTH, rel=0.02)
    if "asynchronous" in strategy:  # the server's card is always busy, so that latency does not matter
        return
    assert fit_records([records(strategy)], bandwidth=BANDWIDTH).shape.wires[0].latency == pytest.approx(
        LATENCY, rel=0.03
    )


def test_one_record_does_not_tell_latency_from_bandwidth_and_the_notes_say_so(records) -> None:
    found = fit_records([records("all_reduce")])
    assert any("latency and bandwidth cannot be determined separately" in note for note in found.notes)
    assert found.shape.wires[0].latency == 0
    assert found.shape.wires[0].bandwidth < BANDWIDTH
    again = fit_records([records("all_reduce"), records("all_reduce")])
    assert any("latency and bandwidth cannot be determined separately" in note for note in again.notes)


@pytest.mark.parametrize(
    ("first", "second"),
    few(
        [("all_reduce", "ps(consistency=bsp)"), ("local_sgd(period=4)", "ps(consistency=asynchronous)")],
        ("all_reduce", "ps(consistency=bsp)"),
    ),
)
def test_two_records_tell_latency_and_bandwidth(records, first: str, second: str) -> None:
    found = fit_records([records(first), records(second)])
    wire = found.shape.wires[0]
    assert (wire.latency, wire.bandwidth) == (pytest.approx(LATENCY, rel=0.03), pytest.approx(BANDWIDTH, rel=0.03))
    assert read_cluster(found.to_toml(), name="fitted") == found.shape


def test_a_fit_predicts_another_strategy(records) -> None:
    """The point of it all: what was learned from two strategies says how long a third takes."""
    shape = fit_records([records("all_reduce"), records("ps(consistency=bsp)")]).shape
    third = records("all_reduce(collective=recursive_doubling)")
    real = next(one for one in fit_records([third]).notes if " s per step" in one)
    told = records("all_reduce(collective=recursive_doubling)", str(shape.compute()), str(shape.network()))
    ours = next(one for one in fit_records([told]).notes if " s per step" in one)
    seconds = [float(one.rsplit(": ", 1)[1].split()[0]) for one in (real, ours)]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.05)


def test_workers_of_different_speed_are_groups(records) -> None:
    shape = fit_records([records("all_reduce", "speeds(constant(0.02), (1, 1, 1, 4))")], latency=LATENCY).shape
    assert [group.speed for group in shape.groups] == pytest.approx([1, 1, 1, 0.25])
    assert shape.law == ConstantTime(0.02)
    assert shape.tiers == (tuple(group.name for group in shape.groups),)


@pytest.mark.parametrize("card", few(["link", "fair_link"], "fair_link"))
def test_a_record_of_several_hosts_tells_the_card_that_workers_of_a_host_share(records, card: str) -> None:
    network = f"tiers((2, 2), (0, 0), (link(1e12),), ({card}('50mbit', '3ms'),))"
    shape = fit_records([records("all_reduce", network=network)], latency=LATENCY).shape
    assert [(group.count, group.workers) for group in shape.groups] == [(2, 2)]
    assert [(wire.reach, wire.fair) for wire in shape.wires] == [("node", False), ("inside", card == "fair_link")]
    assert shape.wires[1].bandwidth == pytest.approx(BANDWIDTH, rel=0.05)
    uneven = fit_records([records("all_reduce", network=network.replace("(2, 2)", "(3, 1)"))], latency=LATENCY).shape
    assert [(group.name, group.workers) for group in uneven.groups] == [("host-0", 3), ("host-1", 1)]
    assert uneven.wires[0].groups == ("host-0",)
    with pytest.raises(ConfigurationError, match="all records must have the same hosts"):
        fit_records([records("all_reduce"), records("all_reduce", network=network)])


def test_hosts_whose_workers_are_no_neighbors_are_refused() -> None:
    assert hosts_in([HostsEvent(0.0, ((0,), (1, 2)))]) == ((0,), (1, 2))
    assert hosts_in([HostsEvent(0.0, ((0,), (1,))), HostsEvent(1.0, ((0,), (1, 2)))]) == ((0,), (1, 2)), "the last"
    assert hosts_in([]) == ()
    with pytest.raises(ConfigurationError, match="workers of a host must have consecutive ranks"):
        hosts_in([HostsEvent(0.0, ((0, 2), (1, 3)))])


def test_a_run_whose_messages_cost_nothing_says_that_no_link_can_be_told(records) -> None:
    found = fit_records([records("all_reduce", network="ideal")])
    assert any("too small to determine latency or bandwidth" in note for note in found.notes)
    assert fit_records([records("local_sgd", workers=1)]).shape.wires == ()


def test_a_fit_refuses_what_it_cannot_use(records, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="at least one record"):
        fit_records([])
    with pytest.raises(ConfigurationError, match="contains no run"):
        fit_records([tmp_path])
    with pytest.raises(ConfigurationError, match="all records must have the same workers, got 4 and 1"):
        fit_records([records("all_reduce"), records("local_sgd", workers=1)])


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("constant(0.01)", ConstantTime),
        ("lognormal(0.01, sigma=0.2)", Lognormal),
        ("lognormal(0.01, sigma=1)", Lognormal),
        ("slow_spells(constant(0.01), 0.02, 10, 5)", Empirical),
        ("pareto(0.01, shape=2.2)", Empirical),
    ],
)
def test_the_law_of_durations_is_found(text: str, kind: type[ComputeModel]) -> None:
    law = ComputeModel.parse(text)
    draws = np.array([value for _, value in zip(range(2000), law.stream(1, 0), strict=False)])
    found, why = fit_law(draws)
    assert isinstance(found, kind), why
    assert mean_of(found) == pytest.approx(draws.mean(), rel=1e-4)
    if isinstance(found, Lognormal) and isinstance(law, Lognormal):
        assert found.sigma == pytest.approx(law.sigma, rel=0.06)
    if isinstance(found, Empirical):
        again = np.array([value for _, value in zip(range(2000), found.stream(2, 0), strict=False)])
        for share in (0.25, 0.5, 0.75):
            assert np.quantile(again, share) == pytest.approx(np.quantile(draws, share), rel=0.12)


def test_why_a_law_was_taken_is_said_in_words() -> None:
    assert (
        "no named distribution fits: the Kolmogorov-Smirnov distance of 400 durations"
        in fit_law([0.01] * 200 + [0.05] * 200)[1]
    )
    assert fit_law([0.01] * 5)[1].startswith(
        "gradient times are treated as constant: the standard deviation of 5 durations is below"
    )
    logs = np.random.default_rng(0).normal(size=400)
    assert fit_law(np.exp(logs))[1].startswith(
        "gradient times are treated as lognormal: the Kolmogorov-Smirnov distance of 400 durations"
    )


def test_a_law_needs_durations() -> None:
    for wrong in ([0.1], [0.1, 0.0], [0.1, float("inf")]):
        with pytest.raises(ConfigurationError, match="at least two durations > 0"):
            fit_law(wrong)


def probed(
    alone: float, together: float, workers: int = 4, steps: int = 20, cores: int = 2, job: str = "digits"
) -> ClusterShape:
    """What is made of a probe in which gradients took so long, and messages 100 µs and 1 ns a byte."""
    random = np.random.default_rng(0)
    events: list[StepEvent | ScalarEvent] = [
        StepEvent(0.0, rank, step, None, usual * random.lognormal(0, 0.01), 0, 0, 0, 0, 0, 0)
        for rank in range(workers)
        for step in range(1, 2 * steps + 1)
        for usual in [alone if step <= steps else together]
    ]
    for pair in ((0, 1), (0, 2), (1, 2)):
        events += [ScalarEvent(0.0, 0, f"one way {pair[0]} {pair[1]} {n}", 1e-4 + 1e-9 * n) for n in (4, 100000)]
    events += [ScalarEvent(0.0, 0, f"message {one} {one + 1}", 2e-5) for one in range(2)]
    events += [ScalarEvent(0.0, one, f"copy {one} {n}", 2e-9 + 2e-5 / n) for one in range(2) for n in (4, 100000)]
    machine = calibrate.Machine(measure_rates(elements=10, rounds=1), 1e9, 4e6, cores)
    found = calibrate.described(events, job, workers, steps, machine, "measured")
    assert read_cluster(found.to_toml(), name="here") == found.shape
    return found.shape


def test_what_a_probe_found_is_a_link_and_a_number_of_cores() -> None:
    shape = probed(0.01, 0.0201)
    assert (shape.message, shape.copy) == (2e-5, pytest.approx(2e-9)), "a core also handles the message"
    assert shape.wires[0].latency == pytest.approx(1e-4 - 2 * 2e-5, rel=1e-3), "both ends handle a message"
    assert shape.wires[0].bandwidth == pytest.approx(1e9, rel=1e-3)
    assert (shape.groups[0].cores, mean_of(shape.law)) == (2, pytest.approx(0.01005, rel=0.01))
    assert shape.operations == 1e9
    assert shape.overhead + 4e6 / 1e9 == pytest.approx(0.01, rel=0.01), "the job itself takes what it took"
    assert probed(0.01, 0.0101).groups[0].cores == 4
    assert probed(0.01, 0.0101, cores=64).groups[0].cores == 64, "nobody waited for a core: there are more"
    assert probed(0.01, 0.0134, cores=64).groups[0].cores == 3
    odd = probed(0.01, 0.0163)
    assert (odd.groups[0].cores, mean_of(odd.law)) == (3, pytest.approx(0.0163 * 3 / 4, rel=0.01))


def test_a_step_besides_its_gradient_is_that_of_a_worker_that_computes_alone() -> None:
    def step(rank: int, number: int, seconds: float, compute: float) -> StepEvent:
        return StepEvent(seconds, rank, number, None, compute, 0, 0, 0, 0, 0, 0)

    alone = [step(rank, i, 10 * rank + 0.013 * i, 0.01) for rank in (0, 1) for i in range(1, 8)]
    together = [step(rank, i, 30 + i, 0.02) for rank in (0, 1) for i in range(8, 12)]
    machine = calibrate.Machine(Rates(), 1e9, None, 1)
    found = calibrate.described([*alone, *together], "digits", 1, 7, machine, "measured")
    assert found.shape.step == pytest.approx(0.003)


JOB_FILE = """
from dataclasses import replace
from flockstep.runtime.setup import load_job

def job():
    return replace(load_job("softmax", 0), name="wave")
"""


def test_a_plan_recognizes_the_file_of_which_a_cluster_was_measured(tmp_path: Path) -> None:
    """By content: the job's own name is not the file's, and another file's job may have the same."""
    file, other = tmp_path / "mine.py", tmp_path / "other.py"
    file.write_text(JOB_FILE)
    other.write_text(f"{JOB_FILE}# of other content\n")
    shape = probed(0.01, 0.0201, job=str(file))
    assert Site(task_of(str(file)), shape).seconds is None, "compute says how long its gradients take"
    assert Site(task_of(str(file), batch=7), shape).seconds is not None
    assert Site(task_of(str(other)), shape).seconds is not None
    assert Site(task_of("softmax"), probed(0.01, 0.0201, job="softmax()")).seconds is None


def test_pairs_whose_messages_tell_no_bandwidth_are_left_out_and_without_any_other_it_is_refused() -> None:
    notes: list[str] = []
    flat, plain = {4: 3e-4, 1 << 20: 2e-4}, {4: 1e-4, 1 << 20: 1e-4 + 1e-9 * ((1 << 20) - 4)}
    wire = calibrate.wire_of({("0", "1"): flat, ("0", "2"): plain}, 0.0, notes)
    assert wire.bandwidth == pytest.approx(1e9, rel=1e-3)
    assert any("1 pair of workers left out" in note for note in notes)
    with pytest.raises(
        ConfigurationError, match="from which no bandwidth follows; calibrate while the machine is idle"
    ):
        calibrate.wire_of({("0", "1"): flat}, 0.0, [])


PROBE = """
import sys
from flockstep.launchers.simulate import simulate
from flockstep.planning import calibrate
from flockstep.records.config import RunConfig
from flockstep.records.folder import RunFolder
if __name__ == "__main__":
    probe, folder = calibrate.__file__.replace("calibrate.py", "probe.py"), sys.argv[1]
    strategy = "flockstep_probe(rounds=1)"
    simulate(RunConfig(kind="simulate", job="softmax", strategy=strategy, workers=2, steps=2, imports=(probe,)), folder)
    for pair, times in calibrate.messages_in(RunFolder(folder).read_events())[0].items():
        print(*pair, *times)
"""


def test_the_large_message_of_a_small_model_is_large(tmp_path: Path) -> None:
    """In a process of its own, for the probe registers itself."""
    script = tmp_path / "script.py"
    script.write_text(PROBE)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.split() == ["0", "1", "4", str(1 << 20)], done.stderr


@pytest.fixture
def a_second_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which everything that is measured takes one second."""
    ticks = itertools.count()
    monkeypatch.setattr("flockstep.planning.calibrate.time.perf_counter", lambda: float(next(ticks)))


def test_a_product_of_matrices_tells_operations(a_second_each: None) -> None:
    assert measure_operations(size=32, rounds=2) == 65540, "2 · 32³, in four digits"


def test_rates_are_of_what_was_asked_for(a_second_each: None) -> None:
    rates = measure_rates(("half", "identity"), ("sgd(lr=0.1, momentum=0.9)",), elements=1000, rounds=2)
    assert set(rates.encode) == set(rates.decode) == {"half", "identity"}
    assert {rate for table in (rates.encode, rates.decode, rates.optimizer) for rate in table.values()} == {1000}
    with pytest.raises(ConfigurationError, match="did you mean 'half'"):
        measure_rates(("hlaf",))
    with pytest.raises(ConfigurationError, match="elements and rounds"):
        measure_rates(rounds=0)


COMMAND = """
import sys
from flockstep.cli.app import run
if __name__ == "__main__":
    sys.exit(run(["calibrate", *sys.argv[1:]]))
"""


@pytest.mark.full
def test_the_command_measures_this_machine(tmp_path: Path) -> None:
    """In a process of its own, for the probe registers itself."""
    script, out = tmp_path / "command.py", tmp_path / "mine" / "here.toml"
    script.write_text(COMMAND)
    arguments = ["-n", "2", "--gradients", "4", "--rounds", "2", "--job", "softmax", "--out", str(out)]
    home = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=100, env=home
    )
    assert done.returncode == 0, done.stderr
    kept = tmp_path / ".cache" / "flockstep" / "here.toml"
    assert kept.read_text() == out.read_text()
    assert str(kept) in done.stderr
    shape = load_cluster(out)
    assert (shape.workers, shape.job) == (2, "softmax")
    assert 1e5 < shape.wires[0].bandwidth < 1e12
    assert 1e-7 < shape.message < 1e-2
    assert 1e-6 < mean_of(shape.compute()) < 1
    assert set(shape.rates.encode) == {"half"}
    assert "times as long as with one worker alone" in done.stdout


def test_the_command_fits_a_record_and_refuses_options_of_the_other_way(records, tmp_path: Path, capsys) -> None:
    from click.testing import CliRunner

    app = command_of(command.calibrate, "calibrate")
    folder = str(records("all_reduce"))
    done = CliRunner().invoke(app, ["--from", folder, "--latency", "3ms"])
    assert done.exit_code == 0, done.output
    assert read_cluster(done.output).wires[0].bandwidth == pytest.approx(BANDWIDTH, rel=0.02)
    for wrong, rule in (
        (["--from", folder, "-n", "3"], "is only for measuring this machine"),
        (["--bandwidth", "1gbit"], "is only for --from"),
        (["--from", folder, "--latency", "100"], "--latency must have a unit, got '100'; write it like '100us'"),
        (["--from", folder, "--bandwidth", "1"], "--bandwidth must have a unit, got '1'; write it like '1gbit'"),
        (["--from", folder, "--out", "x.json"], "--out must be a .toml file, got 'x.json'; end the name in .toml"),
    ):
        failed = CliRunner().invoke(app, wrong)
        assert isinstance(failed.exception, ConfigurationError), wrong
        assert rule in str(failed.exception)
