"""`flockstep chaos`: disruptions happen, sound runs break no invariant, and each planted defect is found."""

from __future__ import annotations

import math
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from flockstep import registry
from flockstep.cli.app import run as run_command
from flockstep.errors import ConfigurationError
from flockstep.launchers.simulate import simulate
from flockstep.records.config import RunConfig
from flockstep.records.events import LostEvent, StepEvent, UpdateEvent
from flockstep.records.folder import RunFolder
from flockstep.runtime.replication import ReplicatedServer
from flockstep.strategies import gossip
from flockstep.strategies.base import Strategy
from flockstep.strategies.consistency.stale_synchronous import StaleSynchronous
from flockstep.strategies.parameter_server import ParameterServer
from flockstep_lab.chaos.base import Disruption, Expected, Setting
from flockstep_lab.chaos.campaign import BaselineRun, drawn
from flockstep_lab.chaos.invariants import INVARIANTS, RunHistory, broken
from flockstep_lab.chaos.kills_head import KillsHead
from flockstep_lab.chaos.kills_server import KillsServer
from support.matrix import few

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes by their names in /proc")
STEPS = 40
SSP = "ps(consistency=ssp(1))"
REPLICATED = "ps(consistency=ssp(1), replicas=1)"
SERVERS = {KillsServer, KillsHead}


def recorded(strategy: str, place: Path) -> RunHistory:
    """The history of a simulated run with one slow worker."""
    config = RunConfig(
        kind="simulate", job="softmax", strategy=strategy, workers=4, steps=STEPS, threads=1, faults=("slows(1, 9)",)
    )
    simulate(config, place)
    record = RunFolder(place).read()
    result = RunFolder(place).read_result()[0].tobytes()
    setting = Setting("softmax", Strategy.parse(strategy), 4, STEPS, 0, 2.0)
    return RunHistory(setting, Expected(), record.events, record.summary, [0], result=result, baseline=result)


@pytest.mark.parametrize("strategy", ["all_reduce", SSP, REPLICATED, "gossip", "easgd"])
def test_a_sound_run_breaks_no_invariant(strategy: str, tmp_path: Path) -> None:
    assert broken(recorded(strategy, tmp_path / "run")) == []


def test_a_server_that_applies_updates_twice_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = ParameterServer._apply

    def twice(self, me, state, group):
        once(self, me, state, group)
        once(self, me, state, group)

    monkeypatch.setattr(ParameterServer, "_apply", twice)
    found = broken(recorded("ps(consistency=asynchronous)", tmp_path / "run"))
    assert f"updates_once: server 0 applied {2 * STEPS} updates of worker 0, which took {STEPS} steps" in found


def test_a_backup_that_lacks_a_push_is_found(tmp_path: Path) -> None:
    sound = recorded(REPLICATED, tmp_path / "run")
    (update, *_) = [event for event in sound.events if isinstance(event, UpdateEvent) and event.source == 2]
    missing = replace(sound, events=[event for event in sound.events if event is not update])
    assert broken(missing) == [f"acknowledged_once: server 0 applied {STEPS - 1} of {STEPS} updates of worker 2"]


def test_a_server_that_forgets_its_bound_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StaleSynchronous, "bound", math.inf)
    (found,) = broken(recorded(SSP, tmp_path / "run"))
    assert found.startswith("staleness_bounded: an update has staleness ")
    assert found.endswith(f"but {Strategy.parse(SSP)} allows 10")


@pytest.mark.parametrize("s", [0, 1, 3])
def test_the_bound_of_ssp_holds_and_is_nearly_reached(s: int, tmp_path: Path) -> None:
    history = recorded(f"ps(consistency=ssp({s}))", tmp_path / "run")
    assert history.summary is not None
    assert history.summary.staleness_max is not None
    bound = history.setting.strategy.most_stale(4)
    assert bound is not None
    assert bound / 4 <= history.summary.staleness_max <= bound


def defects(sound: RunHistory) -> dict[str, RunHistory]:
    """A history with a planted defect for the invariants that read no update."""
    step = next(event for event in sound.events if isinstance(event, StepEvent) and event.step == 5)
    assert sound.summary is not None
    assert sound.result is not None
    return {
        "disruption_fires": replace(sound, fired=False),
        "ends_as_expected": replace(sound, codes=[1]),
        "steps_monotone": replace(sound, events=[*sound.events, msgspec.structs.replace(step, seconds=1e9)]),
        "bits_equal": replace(sound, result=bytes(len(sound.result))),
        "nothing_left": replace(sound, left=["process 7 (worker-1)"]),
    }


def test_each_planted_defect_is_found_by_its_invariant(tmp_path: Path) -> None:
    sound = recorded("all_reduce", tmp_path / "run")
    planted = defects(sound)
    covered = {*planted, "updates_once", "acknowledged_once", "staleness_bounded", "mass_conserved"}
    assert {check.__name__ for check in INVARIANTS} == covered
    for name, history in planted.items():
        assert {text.partition(":")[0] for text in broken(history)} == {name}
    missing = [event for event in sound.events if not (isinstance(event, StepEvent) and event.step == 5)]
    assert broken(replace(sound, events=missing))[0].startswith("steps_monotone: worker 0: 39 of 40 steps")
    lost = replace(sound, lost=frozenset({2}))
    assert broken(lost)[0] == "ends_as_expected: lost nodes: worker 2, expected: none"
    assert broken(replace(sound, hangs=True)) == ["ends_as_expected: a command of the run did not end"]


def kinds_for(setting: Setting) -> set[type]:
    """All kinds of disruptions that a run with checkpoints and `--on-bad-gradient skip` can have."""
    kinds = {registry.load("disruption", name) for name in registry.names("disruption")}
    return kinds - ({KillsServer} if setting.strategy.replicas else {KillsHead} if setting.servers else SERVERS)


@pytest.mark.parametrize("strategy", ["all_reduce", "gossip", SSP, REPLICATED])
def test_the_draws_of_a_seed_are_the_same_and_all_kinds_come(strategy: str) -> None:
    setting = Setting("digits", Strategy.parse(strategy), 4, 200, 3, 2.0, "skip")
    found = [drawn(setting, number) for number in range(120)]
    assert found == [drawn(setting, number) for number in range(120)]
    assert found != [drawn(replace(setting, seed=4), number) for number in range(120)]
    assert {type(one) for one in found} == kinds_for(setting)
    for one in found:
        one.check(setting)
        assert Disruption.parse(str(one)) == one
    hogwild = replace(setting, strategy=Strategy.parse("hogwild"))
    assert not any(drawn(hogwild, number).expected(hogwild).resumes for number in range(60)), "it has no checkpoints"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("kills_worker(9, 20)", "worker 9 does not exist in a run of 4"),
        ("ends_run(200)", "step must be > 0 and < 200, got 200"),
        ("pauses_worker(1, 20, 3)", r"seconds must be <= 0\.6 or >= 8 with a heartbeat of 2 s, got 3"),
        (
            "corrupts_gradient(1, 20)",
            "needs a run that continues after a bad gradient, got --on-bad-gradient stop; use --on-bad-gradient skip",
        ),
        ("kills_launcher('nowhere')", "no point of the launcher is called 'nowhere'"),
        ("kills_writer(-2)", "server 1 does not exist in this run"),
        ("kills_head", r"kills_head needs servers with backups, got ps\(consistency=bsp\); use kills_server"),
        ("kills_server(1)", r"server 1 does not exist in a run of .* with 1 servers"),
    ],
)
def test_a_disruption_that_cannot_happen_is_refused(text: str, rule: str) -> None:
    with pytest.raises(ConfigurationError, match=rule):
        Disruption.parse(text).check(Setting("digits", Strategy.parse("ps(bsp)"), 4, 200, 0, 2.0))


TWICE = """
from flockstep.strategies.parameter_server import ParameterServer

once = ParameterServer._apply

def twice(self, me, state, group):
    once(self, me, state, group)
    once(self, me, state, group)

if once.__name__ != "twice":
    ParameterServer._apply = twice
"""
MORE = """
from flockstep.strategies import gossip

once = gossip.add

def more(me, state, mass, model):
    once(me, state, mass + 1, model)

if once.__name__ != "more":
    gossip.add = more
"""
NO_WINDOW = """
from flockstep.runtime.replication import ReplicatedServer

ReplicatedServer._is_repeated = lambda self, source, number: False
"""


@pytest.mark.parametrize(
    ("strategy", "defect", "disruption", "what"),
    few(
        [
            ("asgd", TWICE, "kills_worker(0, 60)", "updates_once: server 0 applied "),
            (
                "ps(asynchronous, replicas=1)",
                NO_WINDOW,
                "kills_head(0, 'update.applied', 61)",
                "acknowledged_once: server 0 ",
            ),
            ("gossip(1)", MORE, "ends_run(20, how='term')", "mass_conserved: checkpoint "),
        ],
        ("asgd", TWICE, "kills_worker(0, 60)", "updates_once: server 0 applied "),
    ),
)
def test_a_defect_of_a_real_run_is_found_and_a_command_repeats_it(
    strategy: str,
    defect: str,
    disruption: str,
    what: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The command imports the file in this process too: what the file replaces is put back at the end of the test.
    monkeypatch.setattr(ParameterServer, "_apply", ParameterServer._apply)
    monkeypatch.setattr(gossip, "add", gossip.add)
    monkeypatch.setattr(ReplicatedServer, "_is_repeated", ReplicatedServer._is_repeated)
    file = tmp_path / "defect.py"
    file.write_text(defect)
    words = ["softmax", "-s", strategy, "-n", "2", "--steps", "100", "--seed", "7", "--import", str(file)]
    assert run_command(["chaos", *words, "--disruption", disruption, "--out", str(tmp_path / "runs")]) == 1
    out = capfd.readouterr().out
    assert what in out
    assert "  fired  " in out
    assert "1 disrupted runs; runs that violated an invariant: 1" in out
    repeat = shlex.split(next(line for line in out.splitlines() if "repeat: " in line).partition("repeat: ")[2])
    assert repeat[:3] == ["flockstep", "chaos", "softmax"]
    assert Disruption.parse(repeat[repeat.index("--disruption") + 1]) == Disruption.parse(disruption)
    assert repeat[repeat.index("--steps") + 1] == "100"
    folder = tmp_path / "runs" / "0-0" / "run"
    assert RunFolder(folder).read_config().seed == 7
    if disruption.startswith("kills_worker"):
        assert [one.node for one in RunFolder(folder).read_events() if isinstance(one, LostEvent)][:1] == [0]


@pytest.mark.full
@pytest.mark.parametrize(
    "strategy", ["all_reduce", SSP, REPLICATED, "local_sgd(8)", "gossip", "dpsgd", "easgd(period=4)"]
)
def test_every_disruption_of_a_real_run_fires_and_breaks_nothing(
    strategy: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Those that a seed draws; there are fewer kinds than draws, so each kind comes."""
    setting = Setting("digits", Strategy.parse(strategy), 3, 200, 0, 2.0, "skip")
    kinds: dict[type, str] = {}
    for number in range(200):
        one = drawn(setting, number)
        kinds.setdefault(type(one), str(one))
    given = [word for text in kinds.values() for word in ("--disruption", text)]
    words = ["chaos", *setting.words, *given, "--out", str(tmp_path / "runs")]
    assert run_command(words) == 0, capfd.readouterr().out
    out = capfd.readouterr().out
    assert out.count("  fired  ") == len(kinds) == len(kinds_for(setting))


def test_goodput_counts_the_seconds_of_a_restart() -> None:
    baseline = BaselineRun(seconds=5.0, training=3.0, steps=300, result=b"")
    assert baseline.rate == 100
    assert baseline.useful_seconds(5.5) == 3.5
    assert baseline.useful_seconds(11.0) == 9.0, "the second start counts"
    assert np.isclose(baseline.useful_seconds(1.0), 3.0)
