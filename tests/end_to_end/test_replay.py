"""A recorded run on real processes is repeated bit for bit in one process."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flockstep
from flockstep.errors import CompositionError, ConfigurationError, RunError
from flockstep.experiments.replay import Replay
from flockstep.frameworks.numpy import NumpyEngine
from flockstep.launchers.script import repeat_script
from flockstep.launchers.train import resume, train
from flockstep.records.config import RunConfig
from flockstep.records.events import NodeEvent
from flockstep.records.folder import RunFolder
from flockstep.runtime.setup import JOB_FILE, digest
from flockstep_lab.chaos.base import Failpoint
from flockstep_lab.chaos.failpoint import signalled, write_failpoint
from support.hosts import network, on_all
from support.jobs import paced
from support.matrix import few
from support.processes import RealRun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="names processes as Linux does")
STEPS = 40
TWELVE = (
    "ps(asynchronous)",
    "ps(ssp(3))",
    "gossip(p=0.5)",
    "easgd(period=3)",
    "adpsgd",
    "mpca",
    "downpour(n_push=2)",
    "broadcast",
    "partial",
    "streaming_diloco(period=12, fragments=3, overlap=2)",
    "ps(backup(1))",
    "ps(k_async(2), shards=2)",
)
IN_STEP = ("all_reduce", "scatter_reduce", "all_reduce(codec=topk(0.1), feedback=residual)")
SLOW = """
import os, random, time
from flockstep.records import failpoints
_random = random.Random(os.getpid())

def disturb(point):
    if point in ("gradient.computed", "message.received") and _random.random() < 0.2:
        time.sleep(_random.expovariate(1000.0))

failpoints.hooks.append(disturb)
"""
"""Component file of a run whose processes wait at random moments, another each time."""


def recorded(folder: Path, strategy: str, workers: int = 4, seed: int = 0, **settings: Any) -> Path:
    """The record of a run whose processes were disturbed."""
    (disturbance := folder / "disturb.py").write_text(SLOW)
    config = RunConfig(
        kind="train",
        job="softmax",
        strategy=strategy,
        workers=workers,
        seed=seed,
        steps=STEPS,
        evaluate_every=10,
        replayable=True,
        imports=(str(disturbance),),
        **settings,
    )
    train(config, folder / "run")
    return folder / "run"


def final_hashes(record: Path) -> dict[int, str]:
    return {e.node: e.hash for e in RunFolder(record).read_events() if isinstance(e, NodeEvent)}


def require_equal(record: Path) -> Replay:
    replay = Replay(record)
    ends: dict[int, str] = {}
    replay.stage.heard = lambda e: ends.update({e.node: e.hash}) if isinstance(e, NodeEvent) else None
    replay.run()
    assert replay.difference is None
    assert not replay.failures
    assert ends == final_hashes(record)
    return replay


@pytest.mark.parametrize(
    ("strategy", "seed"),
    few(
        [(strategy, seed) for strategy in (*TWELVE, *IN_STEP) for seed in range(3)],
        *[(strategy, 0) for strategy in (*TWELVE[::3], TWELVE[9], IN_STEP[0])],
    ),
)
def test_a_disturbed_run_is_repeated_bit_for_bit(strategy: str, seed: int, tmp_path: Path) -> None:
    replay = require_equal(recorded(tmp_path, strategy, seed=seed))
    evaluations = {(one.node, one.step) for one in replay.agreements}
    assert {(rank, step) for rank in range(4) for step in range(0, STEPS + 1, 10)} <= evaluations


@contextmanager
def one_byte_changed(rank: int, step: int) -> Iterator[None]:
    """One byte of one gradient is another than in the run."""
    whole = NumpyEngine.gradient

    def changed(self: NumpyEngine, params: Any, indices: Any, out: Any, replica: int = 0, at: int = 0) -> float:
        loss = whole(self, params, indices, out, replica, at)
        if (replica, at) == (rank, step):
            out.view(np.uint8)[234] ^= 1
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NumpyEngine, "gradient", changed)
        yield


def test_the_first_difference_is_named(tmp_path: Path) -> None:
    record = recorded(tmp_path, "ps(asynchronous)")
    with one_byte_changed(rank=2, step=17):
        found = Replay(record).run().difference
    assert found is not None
    assert (found.node, found.step) == (2, 17)
    first, last = (int(word) for word in found.what.split("elements ")[1].split(" (")[0].split(" to "))
    assert first <= 234 // 4 <= last
    assert "the gradient differs" in found.what


def test_the_updates_between_two_evaluations_are_named(tmp_path: Path) -> None:
    record = recorded(tmp_path, "ps(asynchronous)")
    found = flockstep.explain(record, 20)
    events = RunFolder(record).read_events()
    assert (found.before.step, found.after.step) == (10, 20)
    assert found.after in events
    norms = [one.norm for one in found.influences]
    assert norms == sorted(norms, reverse=True)
    assert {one.node for one in found.influences} == {-1}
    counted = Counter(source for one in found.influences for source in one.sources)
    assert counted.keys() == {0, 1, 2, 3}
    assert sum(counted.values()) == 40, "ten steps of four workers"


def test_programs_are_looked_at_where_they_wait(tmp_path: Path) -> None:
    record = recorded(tmp_path, "ps(asynchronous)")
    with Replay(record) as replay:
        replay.run(until=10)
        assert max(replay.nodes[rank].step for rank in range(4)) == 10
        ten = {node: one.params.copy() for node, one in replay.nodes.items()}
        replay.run(until=20)
        assert max(replay.nodes[rank].step for rank in range(4)) == 20
        assert all((one.params != ten[node]).any() for node, one in replay.nodes.items())
        replay.run()
        assert replay.difference is None
    with Replay(record) as again:
        again.run(until=10)
        assert all((one.params == ten[node]).all() for node, one in again.nodes.items())
        assert set(again.in_flight) <= {(a, b) for a in again.nodes for b in again.nodes}


@pytest.mark.parametrize(
    ("strategy", "who", "point", "number"),
    few(
        [
            ("ps(asynchronous)", "launcher", "manifest.renamed", 1),
            ("gossip(p=0.5)", "worker-1", "gradient.computed", 33),
            ("all_reduce", "worker-1", "gradient.computed", 33),
        ],
        ("ps(asynchronous)", "launcher", "manifest.renamed", 1),
    ),
)
def test_a_killed_and_resumed_run_is_repeated_over_both_parts(
    strategy: str, who: str, point: str, number: int, tmp_path: Path
) -> None:
    kill = write_failpoint(tmp_path, Failpoint(who, point, number))
    (slow := tmp_path / "slow.py").write_text(SLOW)
    words = ["train", "softmax", "-s", strategy, "-n", "4", "--steps", str(5 * STEPS), "--replayable", "--import", kill]
    RealRun([*words, "--import", str(slow), "--checkpoint-every", "8"], tmp_path / "run").end()
    assert signalled(tmp_path) is not None
    if not (tmp_path / "run" / "summary.json").exists() or RunFolder(tmp_path / "run").unfinished:
        resume(tmp_path / "run")
    replay = Replay(tmp_path / "run")
    replay.run()
    assert replay.difference is None
    assert {one.step for one in replay.agreements if one.node == 0} >= {5 * STEPS}


@pytest.mark.parametrize("strategy", ["all_reduce", "local_sgd(3)"])
def test_a_run_whose_worker_was_lost_is_repeated_with_the_others(strategy: str, tmp_path: Path) -> None:
    kill = write_failpoint(tmp_path, Failpoint("worker-1", "gradient.computed", 20))
    words = ["train", "softmax", "-s", strategy, "-n", "4", "--steps", str(STEPS), "--replayable", "--import", kill]
    ended = RealRun([*words, "--min-workers", "2"], tmp_path / "run").end()
    assert ended.code == 0, ended.err
    replay = Replay(tmp_path / "run")
    replay.run()
    assert replay.difference is None
    assert {one.node for one in replay.agreements if one.step > 20} == {0, 1, 2}


def test_a_run_over_two_hosts_is_repeated_on_one(tmp_path: Path) -> None:
    with network(2) as two:
        words = ["train", paced(tmp_path), "-s", "ps(asynchronous, shards=2)", "-n", "4", "--steps", str(STEPS)]
        ended = on_all(two, *words, "--evaluate-every", "10", "--replayable", first=["--out", tmp_path / "run"])
        assert [one.code for one in ended] == [0, 0], ended
    (tmp_path / "go").touch()
    require_equal(tmp_path / "run")


JOB = """
from flockstep.workloads.softmax import Softmax

def job():
    return Softmax().job(0)
"""
SCRIPT = """
import torch, flockstep
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(160, 6)
nn = torch.nn
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr={rate}, momentum=0.5), {strategy!r})
for call in range({calls}):
    for epoch in range(3):
        for (x_,) in flockstep.shard(DataLoader(TensorDataset(x), batch_size=8, shuffle=True)):
            optimizer.zero_grad()
            model(x_).square().mean().backward()
            optimizer.step()
    optimizer.finish()
    if call + 1 < {calls}:
        optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr={rate}), {strategy!r})
"""


@pytest.mark.parametrize(
    "strategy",
    few(["ps(asynchronous)", "gossip(p=0.5)", "easgd(period=3)", "all_reduce"], "ps(asynchronous)"),
)
def test_a_script_is_repeated_by_processes_of_its_own(strategy: str, tmp_path: Path) -> None:
    (slow := tmp_path / "slow.py").write_text(SLOW)
    (script := tmp_path / "script.py").write_text(SCRIPT.format(strategy=strategy, rate=0.01, calls=1))
    words = ["launch", "-n", "3", "--replayable", "--import", str(slow), str(script)]
    ended = RealRun(words, tmp_path / "run", torch=True).end()
    assert ended.code == 0, ended.err
    nodes = repeat_script(tmp_path / "run", tmp_path / "again")
    assert nodes == len(final_hashes(tmp_path / "run"))
    script.write_text(SCRIPT.format(strategy=strategy, rate=0.0101, calls=1))
    with pytest.raises(ConfigurationError, match="has changed since the run began"):
        repeat_script(tmp_path / "run", tmp_path / "changed")
    config = tmp_path / "run" / "config.toml"
    was, now = RunFolder(tmp_path / "run").read_config().versions[JOB_FILE], digest(script)
    config.write_text(config.read_text().replace(was, now))
    with pytest.raises(RunError, match=r"differs from the run, first here: worker . at step 1: the (loss|gradient)"):
        repeat_script(tmp_path / "run", tmp_path / "changed")


def test_every_call_of_distribute_is_repeated(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(SCRIPT.format(strategy="ps(asynchronous)", rate=0.01, calls=2))
    ended = RealRun(["launch", "-n", "2", "--replayable", str(script)], tmp_path / "run", torch=True).end()
    assert ended.code == 0, ended.err
    tapes = [
        sorted(path.name for path in record.glob("tapes/0/*.tape"))
        for record in (tmp_path / "run", tmp_path / "run" / "distribute-2")
    ]
    assert tapes == [["server-0.tape", "worker-0.tape", "worker-1.tape"]] * 2
    repeat_script(tmp_path / "run", tmp_path / "again")


def test_a_script_whose_exchanges_are_not_recorded_is_refused(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text("import flockstep\nflockstep.join()\n")
    ended = RealRun(["launch", "-n", "2", "--replayable", str(script)], tmp_path / "run").end()
    assert "so a run with it cannot be replayed" in ended.err
    for options in (["--checkpoint-every", "5"], ["--min-workers", "1"]):
        refused = RealRun(["launch", "-n", "2", "--replayable", *options, str(script)], tmp_path / "other").end()
        assert refused.code == 2
        assert "takes no checkpoints and keeps its workers" in refused.err


def test_a_job_file_that_has_changed_is_refused(tmp_path: Path) -> None:
    (file := tmp_path / "job.py").write_text(JOB)
    flockstep.run(str(file), "all_reduce", workers=2, steps=4, replayable=True, out=tmp_path / "run")
    file.write_text(file.read_text() + "# changed\n")
    with pytest.raises(ConfigurationError, match="has changed since the run began"):
        Replay(tmp_path / "run")
    file.unlink()
    with pytest.raises(ConfigurationError, match="in the folder where it began"):
        Replay(tmp_path / "run")


def test_a_run_continued_with_other_workers_is_refused_before_it_is_repeated(tmp_path: Path) -> None:
    kill = write_failpoint(tmp_path, Failpoint("launcher", "manifest.renamed", 1))
    words = ["train", "softmax", "-s", "all_reduce", "-n", "3", "--steps", "2000", "--replayable", "--import", kill]
    RealRun([*words, "--checkpoint-every", "8"], tmp_path / "run").end()
    resume(tmp_path / "run", workers=2)
    with pytest.raises(ConfigurationError, match="with 2 workers in place of 3, which is not replayed"):
        Replay(tmp_path / "run")


def test_a_run_in_the_same_folder_replaces_the_tapes(tmp_path: Path) -> None:
    for strategy in ("all_reduce", "gossip"):
        flockstep.run("softmax", strategy, workers=2, steps=4, replayable=True, out=tmp_path / "run", overwrite=True)
    assert not any(path.stat().st_mode & 0o77 for path in (tmp_path / "run" / "tapes").rglob("*"))
    require_equal(tmp_path / "run")


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    for strategy, why in (
        ("hogwild", "in an order that nobody sees"),
        ("ps(bsp, replicas=1)", "have backups"),
        ("all_reduce(collective=torch_distributed)", "another library"),
    ):
        with pytest.raises(CompositionError, match=why):
            flockstep.run("softmax", strategy, workers=2, steps=4, replayable=True, out=tmp_path / "run")
    flockstep.run("softmax", "all_reduce", workers=2, steps=4, out=tmp_path / "plain")
    with pytest.raises(ConfigurationError, match="record the run with --replayable"):
        Replay(tmp_path / "plain")


def test_a_damaged_tape_is_named(tmp_path: Path) -> None:
    record = recorded(tmp_path, "ps(asynchronous)", workers=2)
    tape = record / "tapes" / "0" / "worker-1.tape"
    tape.write_bytes(tape.read_bytes()[:-3])
    with pytest.raises(ConfigurationError, match=r"worker-1.tape is damaged"):
        Replay(record).run()
