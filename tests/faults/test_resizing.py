"""Runs that were stopped go on with another number of workers, on real processes."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from flockstep.errors import ConfigurationError
from flockstep.launchers.continuing import resized_run
from flockstep.messages import MASTER
from flockstep.records import checkpoints as disk
from flockstep.records.events import StepEvent
from flockstep.records.folder import RunFolder
from flockstep.runtime.setup import BuiltJob, prepare
from flockstep.strategies.base import Strategy
from flockstep_lab.chaos.base import Failpoint
from flockstep_lab.chaos.failpoint import signalled, write_failpoint
from support.jobs import go_on, paced
from support.matrix import few
from support.processes import Ended, RealRun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes by their names in /proc")

STEPS = 120


def stopped(folder: Path, strategy: str, workers: int, *more: str) -> RunFolder:
    """A run that SIGTERM has stopped with a checkpoint."""
    words = ["train", paced(folder), "-s", strategy, "-n", str(workers), "--steps", str(STEPS)]
    run = RealRun([*words, "--evaluate-every", "30", *more], folder / "run")
    run.wait_for_work(25)
    run.fault(signal.SIGTERM, "main")
    ended = run.end()
    assert ended.code == 130
    assert "continues from step" in ended.err
    return RunFolder(folder / "run")


def resumed(folder: Path, *more: str) -> Ended:
    go_on(folder)
    return RealRun(["resume", *more], folder / "run").end()


@pytest.mark.parametrize(
    ("strategy", "workers", "to"),
    few(
        [
            ("all_reduce", 2, 3),
            ("asgd", 3, 2),
            ("ps(bsp, shards=2)", 2, 3),
            ("ps(bsp, shards=2, replicas=1)", 3, 2),
            ("local_sgd(8, outer_optimizer=nesterov)", 3, 2),
            ("streaming_diloco(period=8, overlap=4)", 2, 3),
            ("overlap_local_sgd(4)", 2, 3),
            ("easgd(4)", 2, 3),
            ("gossip(0.5)", 3, 2),
            ("dpsgd", 2, 4),
            ("adpsgd", 2, 4),
            ("sgp(tau=2)", 4, 3),
            ("broadcast", 3, 2),
            ("partial", 2, 3),
            ("downpour", 2, 3),
            ("epoch_server", 2, 3),
            ("mpca", 2, 3),
            ("slice_servers", 2, 3),
            ("gradient_coding", 2, 4),
        ],
        ("asgd", 3, 2),
    ),
)
def test_a_run_goes_on_with_another_number_of_workers(strategy: str, workers: int, to: int, tmp_path: Path) -> None:
    """All samples that the run was to use are used, and no step is taken twice."""
    record = stopped(tmp_path, strategy, workers)
    manifest = disk.newest(record.path).manifest
    ended = resumed(tmp_path, "-n", str(to))
    assert ended.code == 0, ended.err
    config, summary = record.read_config(), record.read_summary()
    before = sum(manifest.steps.values()) // to
    assert (config.workers, config.steps) == (to, -(-workers * STEPS // to))
    assert summary.status == "finished"
    assert (
        f"{to} workers continue the run of {workers} workers, from step {before} of {config.steps}" in summary.notes[1]
    )
    made = [event for event in record.read_events() if isinstance(event, StepEvent)]
    late = [event for event in made if event.seconds > manifest.seconds]
    assert len(made) - len(late) == sum(manifest.steps.values()), "every step before the change is in the record"
    if Strategy.parse(config.strategy).traits.fixed_steps:
        for rank in range(to):
            steps = [event.step for event in late if event.rank == rank]
            assert steps == list(range(before + 1, int(config.steps or 0) + 1))
    assert {event.rank for event in late} == set(range(to))
    assert summary.final_metric is not None
    if Strategy.parse(config.strategy).traits.delivery == "synchronous":
        assert summary.final_metric > 0.8


SLOW = """
import dataclasses, time
from pathlib import Path
from paced import job as usual

def wait():
    if Path("/proc/self/comm").read_text() == "worker-0\\n" and not Path(__file__).with_name("go").exists():
        time.sleep(0.03)

def job():
    made = usual()

    def model():
        found = made.model()

        class Slow(type(found)):
            def gradients(self, *arguments):
                wait()
                return super().gradients(*arguments)

        found.__class__ = Slow
        return found

    return dataclasses.replace(made, model=model)
"""
"""A job whose worker 0 is four times slower than the others until the file `go` is there."""


@pytest.mark.parametrize("strategy", ["overlap_local_sgd(4)", "streaming_diloco(period=8, overlap=4)"])
@pytest.mark.full
def test_an_exchange_that_a_slow_worker_has_not_begun_is_forgotten(strategy: str, tmp_path: Path) -> None:
    """The others are ahead of it by more than one step, and some of them average already."""
    paced(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW)
    words = ["train", str(tmp_path / "slow.py"), "-s", strategy, "-n", "2", "--steps", str(STEPS)]
    run = RealRun(words, tmp_path / "run")
    run.wait_for_work(25)
    run.fault(signal.SIGTERM, "main")
    assert run.end().code == 130
    steps = disk.newest(tmp_path / "run").manifest.steps
    assert steps[0] < steps[1]
    ended = resumed(tmp_path, "-n", "3")
    assert ended.code == 0, ended.err
    assert RunFolder(tmp_path / "run").read_summary().status == "finished"


@pytest.mark.parametrize(
    ("point", "workers"),
    few([("manifest.begun", 2), ("manifest.renamed", 3), ("shard.written", 2)], ("manifest.renamed", 3)),
)
def test_a_run_killed_while_it_changes_goes_on_from_before_or_after(point: str, workers: int, tmp_path: Path) -> None:
    record = stopped(
        tmp_path, "all_reduce", 2, "--import", write_failpoint(tmp_path, Failpoint("launcher", "never", 1))
    )
    old = record.read_config()
    write_failpoint(tmp_path, Failpoint("launcher", point, 1))
    assert resumed(tmp_path, "-n", "3").code != 0
    assert signalled(tmp_path) is not None
    assert record.read_config() == old
    ended = resumed(tmp_path)
    assert ended.code == 0, ended.err
    assert record.read_config().workers == workers
    assert record.read_summary().status == "finished"


@pytest.mark.parametrize("strategy", few(["asgd", "broadcast"], "asgd"))
def test_messages_in_flight_are_used_before_the_number_of_workers_changes(strategy: str, tmp_path: Path) -> None:
    record = stopped(tmp_path, strategy, 3)
    config, checkpoint = record.read_config(), disk.newest(record.path)
    built = BuiltJob.of(config)
    plan = prepare(config, None, built)[1]
    with pytest.raises(ConfigurationError, match="workers must be >= 1, got 0"):
        resized_run(checkpoint, built, plan, config, 0)
    states = resized_run(checkpoint, built, plan, config, 2).states
    if strategy == "asgd":
        assert states[MASTER].optimizer.steps == sum(checkpoint.manifest.steps.values())
        assert (states[0].params == states[MASTER].params).all()
    else:
        ended = resized_run(checkpoint, built, plan, config, 4).states
        assert len({state.params.tobytes() for state in ended.values()}) == 1
    assert RunFolder(record.path).read_config() == config, "nothing was written"
    assert disk.newest(record.path) == checkpoint


def test_a_number_of_workers_that_the_strategy_cannot_have_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    record = stopped(tmp_path, "adpsgd", 2)
    before = disk.newest(record.path), record.read_config(), record.events_file.read_bytes()
    ended = resumed(tmp_path, "-n", "3")
    assert ended.code == 2
    assert "adpsgd on ring needs a bipartite graph, got a cycle of odd length among 3 workers" in ended.err
    assert before == (disk.newest(record.path), record.read_config(), record.events_file.read_bytes())


MINE = """
from dataclasses import dataclass

import flockstep
from flockstep.strategies.local_sgd import LocalSGD

@dataclass(frozen=True)
class Mine(LocalSGD):
    def take_over(self, me, former):
        raise LookupError("no such row")

flockstep.register("strategy", "mine", Mine)
"""


def test_an_error_of_a_users_strategy_while_its_state_changes_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    record = stopped(tmp_path, "mine", 2, "--import", str(file))
    before = record.read_config()
    ended = resumed(tmp_path, "-n", "3")
    assert (ended.code, ended.err.count("\n")) == (1, 1), ended.err
    assert "computing the state of the changed run raised LookupError: no such row (mine.py, line 10)" in ended.err
    assert record.read_config() == before
