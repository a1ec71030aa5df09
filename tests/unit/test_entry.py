"""What processes of a run do before they take part, and what the user's own process keeps."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from flockstep.arrays.schema import Schema
from flockstep.errors import ConfigurationError, Interrupted
from flockstep.frameworks.torch_groups import TorchOptimizer
from flockstep.launchers import children, entry, simulate
from flockstep.planning import trials
from flockstep.records.config import RunConfig
from flockstep.runtime import process as process_module
from flockstep.runtime import session as session_module
from flockstep.runtime.member import NodeSpec
from flockstep.strategies.base import Strategy
from flockstep.workloads.quadratic import Quadratic


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    yield
    entry.limit_threads(1)  # other tests compute in this process


def test_the_users_environment_stays_and_a_torch_that_the_job_imports_is_limited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of simulations and of trials; a process of a run tells libraries that are imported later, too."""
    limited: list[int] = []
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("NPROC", "7")
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    def late(call):  # type: ignore[no-untyped-def]
        def prepare(*given):  # type: ignore[no-untyped-def]
            made = call(*given)
            monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(set_num_threads=limited.append))
            return made

        return prepare

    monkeypatch.setattr(simulate, "prepare", late(simulate.prepare))
    config = RunConfig(kind="simulate", job="quadratic", strategy="all_reduce", workers=2, steps=1, threads=2)
    simulate.simulate(config, tmp_path / "run")
    assert limited == [2]
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(trials, "make_engine", late(trials.make_engine))
    trials.TrialContext(None, {0: Quadratic().job(0)}).engine(0)  # type: ignore[arg-type]
    assert limited == [2, 1]
    assert os.environ["OMP_NUM_THREADS"] == "7"
    entry.limit_process(3)
    assert (limited, os.environ["OMP_NUM_THREADS"]) == ([2, 1, 3], "3")


def test_a_pool_of_the_users_own_is_told_that_the_call_is_unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a process that was forked for a run ends without a message: its supervisor knows why."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    here = SimpleNamespace(_inheriting=True, name="SpawnPoolWorker-1")
    monkeypatch.setattr(multiprocessing, "current_process", lambda: here)
    with pytest.raises(ConfigurationError, match=r"put the call under if __name__ == \"__main__\":"):
        children.end_if_unguarded()
    assert ended == []
    here.name = children.NODE
    with pytest.raises(ConfigurationError, match="put the call under if __name__"):  # os._exit returns in this test
        children.end_if_unguarded()
    assert ended == [children.UNGUARDED]


@pytest.mark.parametrize("optimizer", ["torch(RMSprop)", "clipped(torch(RMSprop))"])
def test_a_server_loads_torch_before_it_joins(optimizer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Otherwise workers would wait for the import at their first step."""
    done: list[str] = []

    class Joining:
        closed = False

        def __init__(self, *given: object, notes: object = None):
            pass

        def join(self, *given: object, part: bool = False, repeats: bool = False) -> None:
            done.append("join")
            raise Interrupted("enough")

        def fail(self, *given: object) -> None:
            pass

        def close(self, *given: object) -> None:
            pass

    monkeypatch.setattr(session_module, "Member", Joining)
    monkeypatch.setattr(TorchOptimizer, "load", lambda self: done.append("load"), raising=False)
    node_spec = NodeSpec("run", -1, "", str(tmp_path), "ipc", 5.0, str(tmp_path), 1, 0)
    process_module.run_server(node_spec, 0, "ps", optimizer, Schema.of({"w": (3,)}, "float32"), 0)
    assert done == ["load", "join"]


def test_the_fork_server_s_own_module_loads_no_compiler() -> None:
    program = f"import sys, {children.PRELOAD}; print([name for name in ('torch', 'numba') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("strategy", "sums"),
    [("all_reduce", True), ("local_sgd(4, outer_optimizer=nesterov)", True), ("gossip", False), ("ps(bsp)", False)],
)
def test_kernels_are_loaded_before_the_start_where_a_strategy_has_a_collective(strategy: str, sums: bool) -> None:
    assert Strategy.parse(strategy).sums == sums


def test_the_supervisor_loads_nothing_that_it_does_without() -> None:
    heavy = ("torch", "numba", "networkx", "sklearn")
    program = f"import sys, flockstep.launchers.train; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
