"""A script's optimizer under scatter_reduce: its state is shared out, and its steps are those of all_reduce."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from support.processes import RealRun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")

SCRIPT = """
import copy
from pathlib import Path
import torch
from torch import nn
import flockstep
from flockstep.errors import ConfigurationError

HERE, rank, found = Path(__file__).parent, flockstep.rank(), {}

def made(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [{"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 0.004}]
    return model, torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, *others], lr=0.008, amsgrad=True)

def train(model, optimizer, steps, clip=None):
    for step in steps:
        stream = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(8, 5, generator=stream)
        optimizer.zero_grad()
        (model(x) - x[:, :3]).square().mean().backward()
        if clip:
            flockstep.clip_grad_norm_(optimizer, clip)
        optimizer.step()

def values(model):
    return [p.detach().clone() for p in model.parameters()]

for name in ("all_reduce", "scatter_reduce"):
    for clip in (None, 0.05):
        model, inner = made()
        optimizer = flockstep.distribute(model, inner, name)
        train(model, optimizer, range(6), clip)
        if name == "scatter_reduce" and clip is None:
            held = optimizer.loop._worker.state.optimizer
            found["held"] = sum(slot.size for slot in optimizer._spec.remembered(held).slots.values())
            found["here"] = len(inner.state)
            try:
                optimizer.state_dict()
            except ConfigurationError as error:
                found["refused"] = str(error)
        optimizer.consolidate_state_dict()
        if rank == 0 or name == "all_reduce":
            found[name, clip, "state"] = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, range(6, 9), clip)
        optimizer.finish()
        found[name, clip] = values(model)
        if name == "scatter_reduce" and clip is None:
            found["after"] = len(inner.state)

def own_rate():
    for group in inner.param_groups if rank else []:
        group["lr"] = 0.5  # which rank 0's state replaces

# from a checkpoint that all_reduce has written, and only rank 0 reads; a sync() keeps what the slices remember
for when in ("before", "after"):
    model, inner = made()
    optimizer = flockstep.distribute(model, inner, "all_reduce")
    train(model, optimizer, range(6))
    kept = copy.deepcopy(optimizer.state_dict())
    optimizer.finish()
    model, inner = model, made()[1]
    inner = type(inner)([{**g, "params": [p for p in model.parameters() if (p.ndim > 1) == (i == 0)]}
                         for i, g in enumerate(inner.param_groups)])
    if when == "before":
        own_rate()
        if rank == 0:
            inner.load_state_dict(kept)
    optimizer = flockstep.distribute(model, inner, "scatter_reduce")
    if when == "after":
        own_rate()
        if rank == 0:
            optimizer.load_state_dict(kept)
        optimizer.sync()
    optimizer.sync()
    train(model, optimizer, range(6, 9))
    optimizer.finish()
    found["resumed", when] = values(model)
torch.save(found, HERE / f"found-{rank}")
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("sharded")
    (folder / "script.py").write_text(SCRIPT)
    ended = RealRun(["launch", "-n", "2", str(folder / "script.py")], folder / "run", torch=True).end()
    assert ended.code == 0, ended.err
    return [torch.load(folder / f"found-{rank}") for rank in range(2)]


def test_each_worker_holds_the_state_of_its_slice_alone(found: list[dict[Any, Any]]) -> None:
    """Three arrays of AdamW with amsgrad for half of 75 parameters, and nothing in the script's own optimizer."""
    assert [own["held"] for own in found] == [3 * 38, 3 * 37]
    assert [(own["here"], own["after"]) for own in found] == [(0, 0)] * 2


def test_steps_are_those_of_all_reduce(found: list[dict[Any, Any]]) -> None:
    """In every bit with two workers, whose sums are in the same order; a clipped norm is added up in other parts."""
    first, second = found
    for a, b, c in zip(*(one["scatter_reduce", None] for one in found), first["all_reduce", None], strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    for a, b, c in zip(*(one["scatter_reduce", 0.05] for one in found), second["all_reduce", 0.05], strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(first["all_reduce", None][0], first["all_reduce", 0.05][0], atol=1e-4)  # it clips


def test_the_collected_state_is_the_one_of_all_reduce(found: list[dict[Any, Any]]) -> None:
    ours, theirs = (found[0][name, None, "state"] for name in ("scatter_reduce", "all_reduce"))
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys() == set(range(4))
    for own, other in ((ours["state"][key], theirs["state"][key]) for key in range(4)):
        assert own.keys() == other.keys()
        for name in own:
            assert torch.equal(own[name], other[name]), name
    for own in found:
        assert "call optimizer.consolidate_state_dict() on every rank after the last step()" in own["refused"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_loaded_state_is_shared_out_and_stays_over_sync(found: list[dict[Any, Any]], when: str) -> None:
    for own in found:
        for a, b in zip(own["resumed", when], own["all_reduce", None], strict=True):
            assert torch.equal(a, b)
