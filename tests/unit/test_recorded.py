"""A recorded run as a law of virtual time: its durations in order, its network, and the records that are refused."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

import msgspec
import pytest

from flockstep.errors import ConfigurationError
from flockstep.launchers.simulate import simulate
from flockstep.nodes import Cluster
from flockstep.planning.fit import RecordedNetwork
from flockstep.planning.recorded import RecordedTime
from flockstep.records.config import RunConfig
from flockstep.records.events import HostsEvent, StepEvent
from flockstep.records.folder import RunFolder
from flockstep.simulation.compute import ComputeModel, Speeds
from flockstep.simulation.fair import FairLink
from flockstep.simulation.law import mean_of
from flockstep.simulation.network import Network
from flockstep.simulation.tiers import Tiers

RECORD = Path(__file__).parent / "data" / "record"
"""A run of two workers and three steps each on real processes."""
ROWS = ((0.01, 0.02, 0.03), (0.04, 0.05, 0.06))
JOB = "softmax(features=900, train=256, test=16, batch=16)"
BANDWIDTH = 6.25e6


def altered(folder: Path, status: str = "finished", events: str = "", **changes: object) -> str:
    """A copy of the record whose configuration, status or events differ."""
    source, record = RunFolder(RECORD), RunFolder(folder / "run")
    record.path.mkdir()
    record.write_config(dataclasses.replace(source.read_config(), **changes))  # type: ignore[arg-type]
    record.events_file.write_text(re.sub(events or r"\Z", "0" if events else "", source.events_file.read_text()))
    error = "worker 1 died"
    record.write_summary(msgspec.structs.replace(record.read_summary(), status=status, error=error))
    return str(record.path)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    config = RunConfig(
        kind="simulate",
        job=JOB,
        strategy="all_reduce",
        workers=4,
        network=str(FairLink(BANDWIDTH)),
        compute="lognormal(0.02)",
        steps=20,
        evaluate_every=1000.0,
    )
    simulate(config, folder)
    return folder


def as_real(simulated: Path, folder: Path, hosts: tuple[tuple[int, ...], ...] = ()) -> str:
    """The simulated run, as if it had taken place on real processes."""
    source, record = RunFolder(simulated), RunFolder(folder / "real")
    record.path.mkdir()
    record.write_config(dataclasses.replace(source.read_config(), kind="train", transport="tcp", network=None))
    more = [HostsEvent(0.0, hosts)] if hosts else []
    record.events_file.write_bytes(msgspec.json.Encoder().encode_lines([*more, *source.read_events()]))
    record.write_summary(source.read_summary())
    record.write_result(*source.read_result())
    return str(record.path)


@pytest.mark.parametrize(("rank", "row"), [(0, ROWS[0]), (1, ROWS[1]), (2, ROWS[0]), (5, ROWS[1])])
def test_a_worker_takes_the_recorded_durations_in_order_and_begins_again(rank: int, row: tuple[float, ...]) -> None:
    law = ComputeModel.parse(f"record({str(RECORD)!r})")
    assert tuple(itertools.islice(law.stream(7, rank), 7)) == (*row, *row, row[0])


def test_the_mean_is_over_all_recorded_workers() -> None:
    law = RecordedTime(str(RECORD))
    assert mean_of(law) == pytest.approx(0.035, rel=1e-3)
    assert mean_of(law, 3) == pytest.approx(0.05, rel=1e-3)
    assert mean_of(Speeds(law, (2.0,))) == pytest.approx(0.07, rel=1e-3)


def test_a_law_read_before_its_folder_is_replaced_stays(tmp_path: Path) -> None:
    law = RecordedTime(altered(tmp_path))
    RunFolder(law.run).events_file.unlink()
    assert next(law.stream(0, 1)) == 0.04


def test_the_record_of_a_script_tells_gradient_times(tmp_path: Path) -> None:
    assert RecordedTime(altered(tmp_path, kind="launch", strategy="as the script says")).rows == ROWS


@pytest.mark.parametrize("law", [RecordedTime, RecordedNetwork])
def test_records_that_tell_no_law_are_refused(law: type[RecordedTime | RecordedNetwork], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no folder"):
        law(str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match=r"contains no run: config\.toml is missing"):
        law(str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"record of a failed run, .*worker 1 died.*; name the record of"):
        law(altered(tmp_path, status="failed"))


@pytest.mark.parametrize("changes", [{"partition": "pipeline(2)"}, {"kind": "launch", "replica_size": 2}])
def test_parts_of_gradients_are_no_law(changes: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"workers hold parts of a replica.*; name the record of a run without"
    ):
        RecordedTime(altered(tmp_path, **changes))  # type: ignore[arg-type]


def test_a_record_without_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="at least three steps of every worker"):
        RecordedTime(altered(tmp_path, workers=3))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kind": "launch"}, r"record of a script, whose messages cannot be rehearsed; use its record for --compute"),
        ({"events": "800"}, "sent no bytes, from which no bandwidth follows; name a network"),
        ({"transport": None}, r"through shared memory, .*; simulate with --network ideal, or record the run with"),
        ({"transport": "tcp(memory=true)"}, "through shared memory"),
    ],
)
def test_records_that_tell_no_bandwidth_are_refused(changes: dict[str, object], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=why):
        RecordedNetwork(altered(tmp_path, **changes))  # type: ignore[arg-type]


def test_the_bandwidth_of_a_real_run_is_found_again(simulated: Path, tmp_path: Path) -> None:
    network = RecordedNetwork(as_real(simulated, tmp_path)).resolved(8)
    assert isinstance(network, FairLink)
    assert network.bandwidth == pytest.approx(BANDWIDTH, rel=0.03)


def test_the_hosts_of_a_real_run_are_machines_and_further_workers_are_on_further_machines(
    simulated: Path, tmp_path: Path
) -> None:
    law = RecordedNetwork(as_real(simulated, tmp_path, ((0,), (1, 2, 3))))
    network = law.resolved(6)
    assert isinstance(network, Tiers)
    assert network.machines == (1, 3, 1, 3)
    assert law.hosts(6) == ((0,), (1, 2, 3), (4,), (5,))


def test_a_run_that_no_bandwidth_explains_is_refused(simulated: Path, tmp_path: Path) -> None:
    """Steps that take a tenth of the time of their own gradients."""
    record = RunFolder(as_real(simulated, tmp_path))
    text = record.events_file.read_text()
    record.events_file.write_text(re.sub(r'"(wait|comm)_seconds":[^,]*', r'"\1_seconds":0.0', text))
    law = RecordedNetwork(str(record.path))
    with pytest.raises(ConfigurationError, match=r"must be within 20% of a step in .*; name a network such as 1gbit"):
        law.start(Cluster(4))


def test_a_simulation_on_the_record_of_a_simulation_repeats_its_seconds(simulated: Path, tmp_path: Path) -> None:
    source, again = RunFolder(simulated), RunFolder(tmp_path / "again")
    law = f"record({str(simulated)!r})"
    config = dataclasses.replace(source.read_config(), seed=1, compute=law, network=law)
    simulate(config, again.path)

    def ends(record: RunFolder) -> list[float]:
        return [event.seconds for event in record.read_events() if isinstance(event, StepEvent)]

    assert len(ends(source)) == 80
    assert ends(again) == pytest.approx(ends(source), rel=1e-9)
    found = again.read_config()
    assert Network.parse(str(found.network)) == FairLink(BANDWIDTH), (
        "the record names the links, not where they are from"
    )
    assert found.compute == f"record(run={str(simulated)!r})"
