"""A script whose model lies where numpy cannot read it, as on a GPU, trains as one whose model lies on the CPU does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flockstep.errors import ConfigurationError
from flockstep.frameworks import torch_flat
from flockstep.records.events import ScalarEvent, StepEvent
from flockstep.records.folder import RunFolder
from flockstep.runtime.loop import FIRST
from support.elsewhere import Elsewhere
from support.matrix import few
from support.processes import MEMORY, RealRun
from support.torch_loops import equal, start, step, values

ALONE = ["all_reduce", "ps(ssp(2))", "local_sgd(4)", "gossip", "easgd", "bucketed", "ps(codec=half, feedback=residual)"]
SUPPORT = Path(__file__).parents[1]

SCRIPT = """
import sys, torch
sys.path.insert(0, {support!r})
from support.elsewhere import Elsewhere
from support.torch_loops import net, start, step, values
import flockstep
from flockstep.frameworks import torch_flat
for place in ("here", "elsewhere"):
    torch.manual_seed(1)
    large = torch.nn.Linear(4, 4000), torch.nn.Linear(4000, 4)  # more than 64 KiB, which are lent
    model, optimizer = start({strategy!r}, torch.nn.Sequential(*large, *net(), torch.nn.BatchNorm1d(2)), momentum=0.9)
    for number in range(9):
        step(model, optimizer, 100 * number + optimizer.loop.rank)
        if number == 4:
            with optimizer.consensus():
                pass
            optimizer.sync()
    optimizer.finish()
    assert (type(optimizer.flat.params) is Elsewhere) == (place == "elsewhere")
    torch.save(values(model), f"{folder}/{{place}}-{{optimizer.loop.rank}}")
    torch_flat.native = lambda flat: flat.as_subclass(Elsewhere)
"""


COUNTED = """
import sys, torch
sys.path.insert(0, {support!r})
from support.elsewhere import Elsewhere
from support.torch_loops import start, step
from flockstep.runtime import reports
from flockstep.frameworks import torch_flat
reports.NEWEST_FIRST = 1e9  # snapshots of the newest model are copies, too
torch_flat.native = lambda flat: flat.as_subclass(Elsewhere)
model, optimizer = start({strategy!r}, torch.nn.Sequential(torch.nn.Linear(4, 500), torch.nn.Linear(500, 2)), lr=0.001)
for number in range(13):
    step(model, optimizer, 100 * number + optimizer.loop.rank)
optimizer.finish()
"""


def away(flat: torch.Tensor) -> Any:
    return flat.as_subclass(Elsewhere)


@pytest.mark.parametrize("strategy", ALONE)
def test_alone(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models = []
    for _ in range(2):
        model, optimizer = start(strategy, momentum=0.9)
        for number in range(6):
            step(model, optimizer, number)
        optimizer.finish()
        models.append(values(model))
        monkeypatch.setattr(torch_flat, "native", away)
    assert equal(*models)


@pytest.mark.parametrize(
    "strategy",
    few(
        ["all_reduce", "ps(bsp, codec=half, feedback=residual)", "dpsgd", "local_sgd(3, outer_optimizer=nesterov)"],
        "ps(bsp, codec=half, feedback=residual)",
    ),
)
def test_among_others(strategy: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(support=str(SUPPORT), strategy=strategy, folder=tmp_path))
    ended = RealRun(["launch", "-n", "2", *MEMORY, str(script)], tmp_path / "run", torch=True).end()
    assert ended.code == 0, ended.err
    models = [
        [value for rank in range(2) for value in torch.load(tmp_path / f"{place}-{rank}")]
        for place in ("here", "elsewhere")
    ]
    for one, other in zip(*models, strict=True):  # products of matrices round by where in memory these lie
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "local"),
    few([("local_sgd(period=3)", True), ("all_reduce", False)], ("local_sgd(period=3)", True)),
)
def test_the_record_counts_what_leaves_the_device_and_a_local_step_moves_nothing(
    strategy: str, local: bool, tmp_path: Path
) -> None:
    """The first steps report a digest of their gradients, which is computed on the host."""
    script = tmp_path / "script.py"
    script.write_text(COUNTED.format(support=str(SUPPORT), strategy=strategy))
    ended = RealRun(["launch", "-n", "2", *MEMORY, str(script)], tmp_path / "run", torch=True).end()
    assert ended.code == 0, ended.err
    totals, moved = {0: 0.0, 1: 0.0}, dict[tuple[int, int], float]()
    now = dict(totals)
    for event in RunFolder(tmp_path / "run").read_events():
        if isinstance(event, ScalarEvent) and event.name == "device_bytes":
            now[event.node] = event.value
        elif isinstance(event, StepEvent):
            moved[event.rank, event.step], totals[event.rank] = now[event.rank] - totals[event.rank], now[event.rank]
    model = 4 * (4 * 500 + 500 + 500 * 2 + 2)
    for rank in range(2):
        for number in range(FIRST + 1, 13):
            exchanged = not local or number % 3 == 1  # after the step before, whose event was written first
            assert moved[rank, number] >= 2 * model if exchanged else moved[rank, number] == 0, (rank, number, moved)


def test_changes_of_the_script_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flat, "native", away)
    model, optimizer = start()
    step(model, optimizer)
    model[0].weight.data[0, 0] += 1
    with pytest.raises(ConfigurationError, match=r"parameter 0\.weight was changed between two steps"):
        step(model, optimizer, 1)
