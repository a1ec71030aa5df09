"""Workers of a declared job die at any message: the others go on with the step or the round in hand, which is taken
exactly once.

Each process notes the mean of the samples of each of its gradients, from which the models are computed here again.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from flockstep.cli.app import run as run_command
from flockstep.records import checkpoints as disk
from flockstep.records.events import EvaluationEvent, StepEvent
from flockstep.records.folder import RunFolder
from support.matrix import few
from support.processes import MEMORY, PATIENCE, Ended, RealRun, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes by their names in /proc")

WORKERS, STEPS, PERIOD, RATE = 4, 24, 4, 0.1
JOB = """
import os, signal, time
from pathlib import Path
import numpy as np
import flockstep
from flockstep.frameworks.base import Data
from flockstep.frameworks.numpy import QuadraticModel
from flockstep.records import failpoints
from flockstep.runtime.member import Member

HERE, DIES_AT, DEADLY, HOLD = Path(__file__).parent, {dies_at}, {deadly}, {hold}
me, taken, reached, met = None, 0, 0, 0
join = Member.join

def joined(member, *arguments, **named):
    global me
    me = member.node_spec.address if me is None else me
    return join(member, *arguments, **named)

def hook(name):
    global reached, met
    met += name == "meeting.begun"
    if met == 2 and DIES_AT.get(me) == "meeting":
        os.kill(os.getpid(), signal.SIGKILL)
    reached += taken == DEADLY
    if reached and reached == DIES_AT.get(me) and not (HERE / "spared").exists():
        os.kill(os.getpid(), signal.SIGKILL)

class Noted(QuadraticModel):
    def gradients(self, params, x, y, out):
        global taken
        losses = super().gradients(params, x, y, out)
        if me is not None:  # otherwise the engine warms up
            with open(HERE / f"means-{{me}}", "ab") as file:
                file.write(x[0].mean(axis=0, dtype=np.float64).tobytes())
            taken += 1
            if HOLD and taken > 8 and not (HERE / "go").exists():
                time.sleep(0.2)
        return losses

Member.join = joined
failpoints.hooks.append(hook)

def job():
    stream = np.random.default_rng(0)
    x = stream.standard_normal((64, 8)).astype(np.float32)
    y = np.zeros(64, np.int64)
    return flockstep.Job(
        model=lambda: Noted(np.ones(8), np.full(8, 0.5)), data=lambda: Data(x, y, x, y), optimizer="sgd(lr={rate})",
        metric=lambda outputs, targets: 0.0, batch=4,
    )
"""
LOCAL = f"local_sgd({PERIOD}, collective=ring)"
DILOCO = f"local_sgd({PERIOD}, collective=ring, outer_optimizer=nesterov(lr=0.7, momentum=0.5))"


def begin(
    folder: Path, strategy: str, dies_at: dict[int, int | str], deadly: int, hold: bool = False, *more: str
) -> RealRun:
    (folder / "job.py").write_text(JOB.format(dies_at=dies_at, deadly=deadly, hold=hold, rate=RATE))
    words = ["train", str(folder / "job.py"), "-s", strategy, "-n", str(WORKERS), *(more or ("--min-workers", "1"))]
    return RealRun([*words, "--steps", str(STEPS), "--evaluate-every", "6"], folder / "run")


def means_of(folder: Path) -> dict[int, np.ndarray]:
    """First rank → mean of the samples of each gradient."""
    files = folder.glob("means-*")
    return {int(one.name.removeprefix("means-")): np.fromfile(one).reshape(-1, 8) for one in files}


def averaged(means: dict[int, np.ndarray], members: Sequence[Sequence[int]]) -> np.ndarray:
    """The model after steps along the mean gradient of these members, by their first ranks."""
    model = np.full(8, 0.5)
    for step, used in enumerate(members):
        model = model - RATE * np.mean([model - means[rank][step] for rank in used], axis=0)
    return model


def local(
    means: dict[int, np.ndarray], members: Sequence[Sequence[int]], steps: int, outer: bool, joined: int = -1
) -> np.ndarray:
    """The mean of the replicas after local steps, with rounds of these members; worker 4 joins with the replica of
    worker 0.
    """
    models = dict.fromkeys(means, np.full(8, 0.5))
    common, velocity = np.full(8, 0.5), np.zeros(8)
    for step in range(steps):
        if step == joined:
            models[4] = models[0]
        models = {
            rank: one - RATE * (one - means[rank][step]) for rank, one in models.items() if step < len(means[rank])
        }
        if (step + 1) % PERIOD == 0:
            mean = np.mean([models[rank] for rank in members[step // PERIOD]], axis=0)
            if outer:
                slope = common - mean
                velocity = 0.5 * velocity + slope
                mean = common = common - 0.7 * (slope + 0.5 * velocity)
            models = dict.fromkeys(models, mean)
    return np.mean([models[rank] for rank in members[-1]], axis=0)


def check(folder: Path, ended: Ended, survivors: Sequence[int]) -> tuple[RunFolder, dict[int, np.ndarray], int]:
    """Survivors have taken equally many steps, and used as many samples as all would have; return their number."""
    assert ended.code == 0, ended.err
    record, means = RunFolder(folder / "run"), means_of(folder)
    taken = {len(means[rank]) for rank in survivors}
    assert len(taken) == 1
    config, summary = record.read_config(), record.read_summary()
    assert summary.status == "finished"
    made = [event for event in record.read_events() if isinstance(event, StepEvent)]
    last = {event.rank: event.step for event in made}
    assert {last[rank] for rank in range(len(survivors))} == {config.steps}
    own = [event for event in made if event.rank == 0]
    assert len(own) == len(means[0]), "worker 0 keeps its rank, and each of its steps is recorded once"
    evaluated = [event.step for event in record.read_events() if isinstance(event, EvaluationEvent)]
    assert len(evaluated) == len(set(evaluated)), "each step once"
    assert len(evaluated) >= 3
    return record, means, taken.pop()


@pytest.mark.parametrize("deadly", few([1, 9], 9))
@pytest.mark.parametrize("point", few(range(1, 15), 2, 8))
@pytest.mark.parametrize(
    "strategy",
    few(
        ["all_reduce(collective=ring)", "bucketed", "two_way(codec=identity, feedback=none)"],
        "all_reduce(collective=ring)",
    ),
)
def test_a_worker_of_a_job_dies_in_a_step(strategy: str, point: int, deadly: int, tmp_path: Path) -> None:
    ended = begin(tmp_path, strategy, {1: point}, deadly).end()
    if strategy == "two_way(codec=identity, feedback=none)" and len(means_of(tmp_path)[1]) > deadly:
        return  # how many messages its step has depends on their order, so that the last points may not be reached
    survivors = [0, 2, 3]
    record, means, steps = check(tmp_path, ended, survivors)
    assert record.read_config().workers == len(survivors)
    assert not disk.folders(record.path), "nothing is read from a disk"
    before, after = [list(range(WORKERS))] * (deadly - 1), [survivors] * (steps - deadly)
    found = record.read_result()[0]
    members = [[*survivors, *more] for n in range(2) for more in combinations([1], n)]
    fits = [np.allclose(found, averaged(means, [*before, last, *after]), rtol=0, atol=1e-5) for last in members]
    assert fits.count(True) == 1
    hashes = record.read_summary().hashes
    assert (len(hashes), len(set(hashes.values()))) == (len(survivors), 1)


@pytest.mark.parametrize(
    ("deadly", "point"), few([(5, 1), *((8, point) for point in range(1, 12))], (5, 1), (8, 2), (8, 9))
)
@pytest.mark.parametrize("strategy", few([LOCAL, DILOCO], DILOCO))
def test_a_worker_of_a_job_dies_in_a_round(strategy: str, deadly: int, point: int, tmp_path: Path) -> None:
    """Who had completed the exchange gives its result to those who had not; local steps stay as they are."""
    ended = begin(tmp_path, strategy, {2: point}, deadly).end()
    survivors = [0, 1, 3]
    record, means, steps = check(tmp_path, ended, survivors)
    assert record.read_config().workers == len(survivors)
    assert not disk.folders(record.path), "nothing is read from a disk"
    rounds = steps // PERIOD
    members = [survivors] if deadly == 5 else [survivors, list(range(WORKERS))]
    found = record.read_result()[0]
    possible = [[list(range(WORKERS)), one, *[survivors] * (rounds - 1)] for one in members]
    fits = [
        np.allclose(found, local(means, one, steps, outer=strategy == DILOCO), rtol=0, atol=1e-5) for one in possible
    ]
    assert fits.count(True) == 1


def test_what_a_lost_worker_computed_since_the_last_round_is_computed_again(tmp_path: Path) -> None:
    """It is in no model: the others use the whole budget of samples, while they wait for the first average."""
    ended = begin(tmp_path, "local_sgd(12, collective=ring)", {1: 1}, 2).end()
    steps = check(tmp_path, ended, [0, 2, 3])[2]
    assert abs(WORKERS * STEPS - 3 * steps) <= 3


@pytest.mark.parametrize("strategy", few(["all_reduce", LOCAL], "all_reduce"))
def test_a_worker_joins_a_job_whose_others_go_on(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin(tmp_path, strategy, {}, 0, True, "--max-workers", "5")
    wait_until(lambda: len(means_of(tmp_path).get(0, ())) > 8, PATIENCE, "the workers train")
    before = run.working()
    assert run_command(["join", str(tmp_path / "run")]) == 0
    (tmp_path / "go").touch()
    assert "the run continues with 5 workers from step " in capsys.readouterr().out
    assert before.items() <= run.working().items()
    record, means, steps = check(tmp_path, run.end(), range(WORKERS))
    assert record.read_config().workers == WORKERS + 1
    joined = steps - len(means[4])
    assert joined >= 8
    means[4] = np.concatenate([np.full((joined, 8), np.nan), means[4]])
    if strategy == "all_reduce":
        members = [range(WORKERS)] * joined + [range(WORKERS + 1)] * (steps - joined)
        assert np.allclose(record.read_result()[0], averaged(means, members), rtol=0, atol=1e-5)
    assert len(set(record.read_summary().hashes.values())) == 1 or strategy == LOCAL


def test_a_worker_dies_while_the_others_meet_one_that_joins(tmp_path: Path) -> None:
    run = begin(tmp_path, "all_reduce", {1: "meeting"}, 0, True, "--min-workers", "1", "--max-workers", "5")
    wait_until(lambda: len(means_of(tmp_path).get(0, ())) > 8, PATIENCE, "the workers train")
    assert run_command(["join", str(tmp_path / "run")]) == 0
    (tmp_path / "go").touch()
    record, means, steps = check(tmp_path, run.end(), [0, 2, 3])
    assert record.read_config().workers == WORKERS
    joined = steps - len(means[4])
    means[4] = np.concatenate([np.full((joined, 8), np.nan), means[4]])
    members = [range(WORKERS)] * joined + [[0, 2, 3, 4]] * (steps - joined)
    assert np.allclose(record.read_result()[0], averaged(means, members), rtol=0, atol=1e-5)


def test_a_worker_dies_in_a_round_after_another_has_joined(tmp_path: Path) -> None:
    run = begin(tmp_path, LOCAL, {1: 4}, 4 * PERIOD, True, "--min-workers", "1", "--max-workers", "5")
    wait_until(lambda: len(means_of(tmp_path).get(0, ())) > 8, PATIENCE, "the workers train")
    assert run_command(["join", str(tmp_path / "run")]) == 0
    (tmp_path / "go").touch()
    record, means, steps = check(tmp_path, run.end(), [0, 2, 3])
    assert record.read_config().workers == WORKERS
    joined = steps - len(means[4])
    means[4] = np.concatenate([np.full((joined, 8), np.nan), means[4]])
    everyone, survivors = range(WORKERS + 1), [0, 2, 3, 4]
    before = [range(WORKERS) if (number + 1) * PERIOD <= joined else everyone for number in range(3)]
    after = [survivors] * (steps // PERIOD - 3)
    possible = [
        local(means, [*before, last, *after], steps, outer=False, joined=joined) for last in (survivors, everyone)
    ]
    fits = [np.allclose(record.read_result()[0], one, rtol=0, atol=1e-5) for one in possible]
    assert fits.count(True) == 1


def test_events_that_workers_held_when_another_died_in_shared_memory_are_recorded(tmp_path: Path) -> None:
    ended = begin(tmp_path, "all_reduce", {1: 1}, 9, False, "--min-workers", "1", *MEMORY).end()
    check(tmp_path, ended, [0, 2, 3])


def test_too_few_workers_complete_the_step_and_end_with_a_checkpoint(tmp_path: Path) -> None:
    ended = begin(tmp_path, "all_reduce(collective=ring)", {1: 4}, 9, True, "--min-workers", "4").end()
    assert ended.code == 130
    assert re.search("worker 1 was killed by SIGKILL.*, and the 3 remaining workers are fewer than", ended.err)
    before, steps = means_of(tmp_path), {}
    for name in ("go", "spared"):
        (tmp_path / name).touch()
    ended = RealRun(["resume"], tmp_path / "run").end()
    assert ended.code == 0, ended.err
    record, means = RunFolder(tmp_path / "run"), means_of(tmp_path)
    survivors = [0, 2, 3]
    for rank in survivors:  # ranks are counted anew, and files are named by the first rank of each process
        steps[rank] = np.concatenate([before[rank], means[survivors.index(rank)][len(before[survivors.index(rank)]) :]])
    members = [range(WORKERS)] * 8 + [survivors] * (len(steps[0]) - 8)
    assert np.allclose(record.read_result()[0], averaged({**steps, 1: before[1]}, members), rtol=0, atol=1e-5)
