"""A gradient that is not finite: it ends the run where it arises, and the sentence names who made it."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from flockstep.arrays.namespace import first_not_finite
from flockstep.errors import Diverged
from flockstep.testing.strategies import Watched, run_strategy
from support.matrix import few
from support.processes import RealRun
from support.scripts import NUMPY

SCRIPT = """
start({strategy!r}, {{"v": (4, 3), "w": (2, 4)}})
for step in range(12):
    optimizer.gradients[:] = np.random.default_rng([step, rank]).normal(size=20)
    if rank == 1 and step == 5:
        optimizer.gradients[14] = np.nan
    optimizer.step()
optimizer.finish()
"""
SAID = r"flockstep: the gradient of worker 1 must be finite, got nan in 'w' at step 5; lower the learning rate.*"


class _Poisoned(Watched):
    """Damages one gradient of worker 2, or one message of worker 1 on its way to the server."""

    where = "gradient"

    def _gradient_due(self, runner, computing):
        if self.where == "gradient" and runner.node.address == 2 and runner.node.step == 4:
            self._gradients.take(2)[1] = np.inf
        super()._gradient_due(runner, computing)

    def _arrive(self, transit, message, sent_at):
        if self.where == "message" and message.source == 1 and message.step == 3 and message.array is not None:
            array = message.array.copy()
            array.view(np.float32)[2] = np.nan
            message = msgspec.structs.replace(message, array=array)
        super()._arrive(transit, message, sent_at)


class _OnItsWay(_Poisoned):
    where = "message"


@pytest.mark.parametrize("strategy", ["all_reduce", "asgd", "gossip", "local_sgd(4)", "hogwild"])
def test_the_worker_whose_gradient_it_is_is_named(strategy: str) -> None:
    said = "the gradient of worker 2 must be finite, got inf in 'weight' at step 4; lower the learning rate"
    with pytest.raises(Diverged, match=said):
        run_strategy(strategy, 4, 12, simulation=_Poisoned)


@pytest.mark.parametrize("strategy", ["ps", "epoch_server(0.5, 4)", "easgd(period=1)"])
def test_a_server_looks_before_it_applies(strategy: str) -> None:
    said = "an update from worker 1 to server 0 must be finite, got nan at element 2 of message '.*' at step 3; lower"
    with pytest.raises(Diverged, match=said):
        run_strategy(strategy, 3, 12, simulation=_OnItsWay)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_element_is_found_wherever_it_is(dtype: str, value: float) -> None:
    array = np.full(1000, 1.0, dtype)
    assert first_not_finite(array) == -1
    for place in (0, 500, 999):
        broken = array.copy()
        broken[place] = value
        assert first_not_finite(broken) == place
    largest = np.full(1000, np.finfo(dtype).max, dtype)  # whose squares overflow
    assert first_not_finite(largest) == -1
    assert first_not_finite(array[:0]) == -1


@pytest.mark.parametrize("strategy", few(["asgd", "all_reduce", "bucketed(1e-5)"], "asgd"))
def test_a_launched_script_ends_with_the_worker_the_step_and_the_tensor(strategy: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(NUMPY + SCRIPT.format(strategy=strategy))
    ended = RealRun(["launch", "-n", "2", str(tmp_path / "script.py")], tmp_path / "run").end()
    assert ended.code == 1
    assert re.search(SAID, ended.err), ended.err
    assert ended.summary is not None
    assert ended.summary["status"] == "diverged"
    assert "worker 1" in ended.summary["error"]
