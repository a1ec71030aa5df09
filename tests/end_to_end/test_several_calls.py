"""Scripts that call `flockstep.distribute` more than once: models side by side, and one after the other."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from flockstep.errors import ConfigurationError
from flockstep.launchers.script import _settings, script_of_module
from flockstep.records.config import RunConfig
from flockstep.records.folder import RunFolder
from support.matrix import few
from support.processes import Ended, RealRun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")

BEFORE = """
import os, signal, sys
from pathlib import Path
import numpy as np
from flockstep.arrays.schema import Schema
from flockstep.runtime.loop import Loop
from flockstep.runtime.node_spec import spec_from_environment
from flockstep.runtime.plan import LocalOptimizer
from flockstep.optimizers.sgd import SGD
from flockstep.strategies.base import Strategy

HERE = Path(__file__).parent
rank = spec_from_environment().address

class Model:
    \"\"\"What `flockstep.distribute` makes of a model whose loss is least where every parameter is `goal + rank`.\"\"\"

    def __init__(self, strategy, size, goal):
        self.params, self.gradient, self.goal = np.zeros(size, np.float32), np.zeros(size, np.float32), goal
        stepper = LocalOptimizer(SGD(lr=0.1), self.params)
        given = Schema.of({"w": (size,)}), Strategy.parse(strategy), stepper, SGD(lr=0.1)
        self.loop = Loop(self.params, self.gradient, *given)

    def steps(self, count):
        for _ in range(count):
            self.gradient[:] = self.params - self.goal - rank
            self.loop.step()

    def end(self, name):
        self.loop.finish()
        np.save(HERE / f"{name}-{rank}", self.params)

"""


def outcome(body: str, folder: Path, workers: int = 2) -> Ended:
    script = folder / "script.py"
    script.write_text(BEFORE + body)
    return RealRun(["launch", "-n", str(workers), str(script)], folder / "run").end()


def result(name: str, folder: Path, workers: int = 2) -> np.ndarray:
    """A model's parameters, which are the same on every worker."""
    found = [np.load(folder / f"{name}-{rank}.npy") for rank in range(workers)]
    assert all(np.array_equal(one, found[0]) for one in found)
    return found[0]


def test_each_call_is_a_run_with_a_strategy_servers_and_a_record(tmp_path: Path) -> None:
    """The last call's strategy has background tasks, which are refused only beside other runs."""
    body = """
one, other = Model("all_reduce", 20, 0.0), Model("ps(consistency=bsp)", 7, 10.0)
for _ in range(10):
    one.steps(1)
    other.steps(2)
one.end("one")
last = Model("local_sgd(period=2)", 5, -3.0)
last.steps(4)
other.steps(1)
other.end("other")
last.end("last")
late = Model("overlap_local_sgd(period=2)", 5, 0.0)
late.steps(6)
late.end("late")
"""
    ended = outcome(body, tmp_path)
    assert (ended.code, ended.out) == (0, ""), ended.err
    for name, goal, steps in (("one", 0.5, 10), ("other", 10.5, 21), ("last", -2.5, 4)):
        np.testing.assert_allclose(result(name, tmp_path), goal * (1 - 0.9**steps), rtol=1e-5)
    expected = [(".", "one", "all_reduce", 10), ("distribute-2", "other", "ps", 21)]
    expected += [("distribute-3", "last", "local_sgd", 4), ("distribute-4", "late", "overlap_local_sgd", 6)]
    for place, name, strategy, steps in expected:
        folder = RunFolder(tmp_path / "run" / place)
        record = folder.read()
        assert record.config.strategy.startswith(strategy)
        assert (record.summary.status, [one.steps for one in record.summary.per_worker]) == ("finished", [steps, steps])
        np.testing.assert_array_equal(folder.read_result()[0], result(name, tmp_path))
    assert "distribute-2, distribute-3, distribute-4" in str(RunFolder(tmp_path / "run").read_summary().notes)


def test_a_finished_call_leaves_no_files_memory_or_sockets_open(tmp_path: Path) -> None:
    """Twenty calls, each with a communicator, as in a script that searches for a learning rate."""
    body = """
import flockstep

def handles(process):
    return len(os.listdir(f"/proc/{process}/fd")), len(os.listdir(f"/proc/{process}/task"))

def shared():
    return sum("memfd:flockstep" in line for line in open("/proc/self/maps"))

supervisor, found = spec_from_environment().supervisor, []
for call in range(20):
    model = Model("ps(consistency=bsp)" if call % 4 == 3 else "all_reduce", 50_000, 1.0)
    with flockstep.join() as ranks:
        assert ranks.all_reduce(np.ones(3))[0] == 2
    model.steps(2)
    model.end("model")
    found.append((*handles("self"), *handles(supervisor), shared()))
np.save(HERE / f"handles-{rank}", found)
"""
    ended = outcome(body, tmp_path)
    assert (ended.code, ended.out) == (0, ""), ended.err
    for rank in range(2):
        found = np.load(tmp_path / f"handles-{rank}.npy")
        files, threads, *_ = (found[4:].max(0) - found[:4].max(0)).tolist()
        assert files <= 2, found
        assert threads <= 2, found
        assert found[:, 4].max() == 0, found
        assert found[4:, 2].max() <= found[1:4, 2].max() + 25, found  # a call that is about to be closed has about 20
        assert found[4:, 3].max() <= found[1:4, 3].max() + 4, found
    for number in range(2, 21):
        assert RunFolder(tmp_path / "run" / f"distribute-{number}").read_summary().status == "finished"


def test_a_call_that_ended_well_is_recorded_so_if_a_later_one_fails(tmp_path: Path) -> None:
    body = """
for goal in (1.0, 2.0):
    model = Model("all_reduce", 4, goal)
    model.steps(3)
    model.end("model")
last = Model("all_reduce", 4, 0.0)
last.steps(2)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
last.steps(2)
"""
    ended = outcome(body, tmp_path)
    assert ended.code == 1
    assert "worker 1 was killed by SIGKILL" in ended.err
    places = (".", "distribute-2", "distribute-3")
    first, second, third = (RunFolder(tmp_path / "run" / place).read_summary() for place in places)
    assert (first.status, second.status, third.status) == ("finished", "finished", "failed")
    assert "failed in a later call of distribute: worker 1 was killed by SIGKILL" in str(first.notes)
    assert "worker 1 was killed by SIGKILL" in str(third.error)


def test_workers_whose_calls_come_in_another_order_are_refused(tmp_path: Path) -> None:
    body = """
first = Model("all_reduce", 4, 0.0)
for size in ((2, 3) if rank else (3, 2)):
    Model("all_reduce", size, 0.0)
"""
    ended = outcome(body, tmp_path)
    assert ended.code == 2
    assert re.search(r"the model of worker \d differs from .*; build the same model on every worker", ended.err)


def test_strategies_with_background_tasks_are_refused_side_by_side(tmp_path: Path) -> None:
    """Nobody would continue the tasks of one run while the script waits in another one."""
    body = """
pairs = Model("adpsgd", 5, 0.0)
pairs.steps(3)
together = Model("all_reduce", 3, 0.0)
"""
    ended = outcome(body, tmp_path)
    assert ended.code == 2, ended.err
    assert "can be used side by side only if their strategies" in ended.err


@pytest.mark.full
def test_tasks_that_begin_later_are_refused_then(tmp_path: Path) -> None:
    body = """
late, together = Model("overlap_local_sgd(period=2)", 5, 0.0), Model("all_reduce", 3, 0.0)
for _ in range(6):
    late.steps(1)
    together.steps(1)
"""
    ended = outcome(body, tmp_path)
    assert ended.code == 2, ended.err
    assert "can be used side by side only if their strategies" in ended.err


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["all_reduce", "gossip"])
def test_a_worker_that_dies_dies_in_every_run(tmp_path: Path, strategy: str) -> None:
    body = f"""
one, other = Model({strategy!r}, 20, 0.0), Model({strategy!r}, 7, 0.0)
for step in range(20):
    one.steps(1)
    if rank == 1 and step == 10:
        os.kill(os.getpid(), signal.SIGKILL)
    other.steps(1)
one.end("one")
other.end("other")
"""
    ended = outcome(body, tmp_path, 3)
    assert "worker 1 was killed by SIGKILL" in ended.err
    records = [RunFolder(tmp_path / "run" / place).read_summary() for place in (".", "distribute-2")]
    if strategy == "all_reduce":
        assert ended.code == 1
        assert [one.status for one in records] == ["failed", "failed"]
    else:
        assert ended.code == 0, ended.err
        assert [one.status for one in records] == ["finished", "finished"]
        assert [np.load(tmp_path / f"{name}-0.npy").shape for name in ("one", "other")] == [(20,), (7,)]


@pytest.mark.full
def test_a_worker_that_does_not_come_to_the_second_call_ends_the_run(tmp_path: Path) -> None:
    body = """
first = Model("all_reduce", 4, 0.0)
first.steps(3)
first.end("first")
if rank == 0:
    Model("all_reduce", 4, 0.0)
"""
    ended = outcome(body, tmp_path)
    assert ended.code == 1
    assert re.search(r"worker 1 (ended|exited).* before the run started|worker 1 .*without joining the run", ended.err)


def test_a_module_runs_as_under_python_m_and_its_ranks_meet(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "goals.py").write_text("GOAL = 4.0\n")
    (package / "train.py").write_text(
        BEFORE
        + """
import flockstep
from .goals import GOAL

assert (__package__, sys.argv[1:]) == ("package", ["--lr", "2"])
model = Model("gossip", 5, GOAL)
model.steps(5)
file = HERE.parent / "of-rank-0"
if flockstep.is_main():
    file.touch()
flockstep.barrier()
assert file.exists()
HERE = HERE.parent
model.end("model")
try:
    flockstep.barrier()
except flockstep.ConfigurationError as error:
    print(error)
"""
    )
    within = ["env", "-C", str(tmp_path)]
    words = ["launch", "-n", "2", "-m", "package.train", "--lr", "2"]
    ended = RealRun(words, tmp_path / "run", within=within).end()
    assert ended.code == 0, ended.err
    assert ended.out.count("barrier() needs a run; call it after distribute() and before finish()") == 2
    assert result("model", tmp_path).shape == (5,)
    assert RunFolder(tmp_path / "run").read_config().job == "package.train"


@pytest.mark.parametrize("known", few([True, False], True))
def test_a_barrier_tells_of_a_rank_that_died(tmp_path: Path, known: bool) -> None:
    """Whether this rank hears of the death before or while it waits."""
    body = f"""
import flockstep
model = Model("gossip", 5, 0.0)
model.steps(2)
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
while {known} and 2 in model.loop._worker.peers:
    model.loop.listen()
flockstep.barrier()
print("passed")
"""
    ended = outcome(body, tmp_path, 3)
    assert (ended.code, ended.out) == (1, ""), ended.err
    assert "worker 2" in ended.err


def test_hosts_compare_the_module_that_they_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = RunConfig(kind="launch", job="train_it", module=True, strategy="as the script says", workers=2)

    def settings(content: str) -> dict[str, str]:
        (tmp_path / "train_it.py").write_text(content)
        return _settings(config, script_of_module("train_it"), ["train_it"])

    assert settings("a = 1") == settings("a = 1")
    assert settings("a = 1") != settings("a = 2")


def test_a_module_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("raise AssertionError('looking for a module runs nothing')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"there is no module package\.train; give its name as with python -m"):
        script_of_module("package.train")
    (tmp_path / "package" / "train.py").touch()
    assert script_of_module("package.train").name == "runpy.py"
