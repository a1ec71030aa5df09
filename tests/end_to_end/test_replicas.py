"""Scripts whose replicas are held by several processes, with FSDP2 or tensor parallelism: they train as replicas that
one process holds, and mistakes are told in one sentence before the first step.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from support.processes import MEMORY, Ended, RealRun
from support.scripts import COMPILER

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")

EXAMPLES = Path(__file__).parents[2] / "examples"
STREAMING = "streaming_diloco(period=6, fragments=3, overlap=2)"
CASES = {
    (2, 2): [
        *(("sharded", one) for one in ("all_reduce", "local_sgd(period=5)", "ps(consistency=bsp)", "dpsgd", STREAMING)),
        *(("tensor", one) for one in ("all_reduce", "ps(consistency=bsp)", STREAMING)),
    ],
    (4, 2): [("sharded", "all_reduce"), ("tensor", "local_sgd(period=5)"), ("tensor", STREAMING)],
    (2, 4): [("mesh", "all_reduce"), ("mesh", STREAMING)],
}
"""Numbers of replicas, and of processes of each → model and strategy of each training."""
BEGIN = """
import sys
from pathlib import Path
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
import flockstep

HERE, found, replica = Path(__file__).parent, {}, flockstep.replica()
"""
TRAINS = """
def made(kind):
    torch.manual_seed(0)
    last = nn.LayerNorm(3) if kind == "tensor" else nn.BatchNorm1d(3)
    model = nn.Sequential(nn.Linear(7, 10), nn.Tanh(), nn.Linear(10, 3), last)  # of 3 rows, processes hold 2 and 1
    if replica.size > 1 and kind == "sharded":
        fully_shard(model[0], mesh=replica.mesh())
        fully_shard(model[2], mesh=replica.mesh())
        model[3].requires_grad_(False)
    elif replica.size > 1:
        mesh = replica.mesh(("dp", "tp"), (replica.size // 2, 2))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if kind == "mesh":
            fully_shard(model, mesh=mesh["dp"])
    elif kind == "sharded":
        model[3].requires_grad_(False)
    return model

def whole(model):
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: (one.full_tensor() if hasattr(one, "full_tensor") else one).detach().clone() for name, one in named}

def train(kind, strategy, rule):
    model = made(kind)
    model[3].eval()
    optimizer = flockstep.distribute(model, rule(model.parameters()), strategy)
    data = torch.Generator().manual_seed(replica.index)
    for step in range(20):
        x, y = torch.randn(8, 7, generator=data), torch.randn(8, 3, generator=data)
        if kind != "tensor" and replica.size > 1:
            x, y = x.chunk(2)[replica.rank * 2 // replica.size], y.chunk(2)[replica.rank * 2 // replica.size]
        optimizer.zero_grad()
        for part in (slice(0, len(x) // 2), slice(len(x) // 2, None)):  # gradients of two passes are added up
            (nn.functional.mse_loss(model(x[part]), y[part]) / 2).backward()
        if not strategy.startswith("ps"):
            flockstep.clip_grad_norm_(optimizer, 0.5)
        optimizer.step()
        if step == 12:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
            optimizer.sync()
    with optimizer.consensus():
        shown = whole(model)
    optimizer.finish()
    return shown, whole(model)

adamw = lambda parameters: torch.optim.AdamW(parameters, 1e-2)
for case in CASES:
    found[case] = train(*case, adamw)
torch.save(found, HERE / f"found-{flockstep.rank()}")
"""


def launched(folder: Path, body: str, options: list[str], *arguments: str) -> Ended:
    (folder / "script.py").write_text(COMPILER + BEGIN + body)
    words = ["launch", *options, str(folder / "script.py"), *arguments]
    return RealRun(words, folder / "run", torch=True).end()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], list[list[dict[Any, Any]]]]:
    """What the scripts found, of replicas of one process, and of as many replicas of several processes."""

    @cache
    def ran(replicas: int, size: int) -> list[list[dict[Any, Any]]]:
        runs = []
        for processes, words in ((replicas, []), (replicas * size, ["--replica-size", str(size)])):
            folder = tmp_path_factory.mktemp("run")
            ended = launched(folder, f"CASES = {CASES[replicas, size]}\n{TRAINS}", ["-n", str(processes), *words])
            assert ended.code == 0, ended.err
            runs.append([torch.load(folder / f"found-{rank}") for rank in range(processes)])
        return runs

    return ran


@pytest.mark.parametrize(
    ("shape", "case"),
    [
        pytest.param(shape, case, marks=[] if shape == (2, 2) else pytest.mark.full)
        for shape, cases in CASES.items()
        for case in cases
    ],
)
def test_a_replica_of_several_processes_trains_as_one_process_would(
    found: Callable[[int, int], list[list[dict[Any, Any]]]], shape: tuple[int, int], case: tuple[str, str]
) -> None:
    """With AdamW over 20 steps, accumulated and clipped gradients, and a model that the script changes meanwhile."""
    (one, *_), split = found(*shape)
    for process in split:
        for expected, shown in zip(one[case], process[case], strict=True):
            assert expected.keys() == shown.keys()
            for name, value in expected.items():
                torch.testing.assert_close(shown[name], value, atol=1e-5, rtol=0)


LEARNS = """
import torch.distributed as dist
torch.manual_seed(0)
x = torch.randn(64, 7)
y = nn.Sequential(nn.Linear(7, 10), nn.Tanh(), nn.Linear(10, 3))(x).detach()
for strategy in STRATEGIES:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    parallelize_module(model, replica.mesh(("tp",)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    before = nn.functional.mse_loss(model(x), y).item()
    optimizer = flockstep.distribute(model, torch.optim.AdamW(model.parameters(), 1e-2), strategy)
    data = torch.Generator().manual_seed(replica.index)
    for step in range(40):
        mine = torch.randint(64, (8,), generator=data)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
        optimizer.step()
        own = torch.cat([one.detach().flatten() for one in (*model[3].parameters(), *model[4].parameters())])
        both = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(both, own)
        assert torch.equal(*both), (strategy, step)
        assert not optimizer.state or len(optimizer.state) < 8  # of eight parameters, the other process trains some
    optimizer.finish()
    assert nn.functional.mse_loss(model(x), y).item() < before / 2, strategy
"""


def test_copies_of_a_parameter_stay_equal_while_the_processes_of_a_replica_hear_from_others_at_different_times(
    tmp_path: Path,
) -> None:
    strategies = ("gossip", "easgd", "ps(consistency=ssp(3))", "all_reduce(codec=topk(0.1), feedback=residual)")
    ended = launched(tmp_path, f"STRATEGIES = {strategies}\n{LEARNS}", ["-n", "4", "--replica-size", "2"])
    assert ended.code == 0, ended.err


@pytest.mark.parametrize(
    ("example", "size", "arguments", "at_most"),
    [
        ("tensor_parallel", 2, ["--epochs", "3"], 1 - 0.7),
        pytest.param("fsdp_diloco", 2, ["--steps", "40"], 4.0, marks=pytest.mark.full),
        pytest.param("mesh_2x2", 4, ["--epochs", "4"], 1 - 0.7, marks=pytest.mark.full),
    ],
)
def test_examples_learn(tmp_path: Path, example: str, size: int, arguments: list[str], at_most: float) -> None:
    """`at_most`: share of errors, which is 0.9 for an untrained model, or loss, 5.5 for an untrained model."""
    text = (EXAMPLES / f"{example}.py").read_text()
    ended = launched(tmp_path, text, ["-n", str(2 * size), "--replica-size", str(size)], *arguments)
    assert ended.code == 0, ended.err
    *_, (kind, found) = re.findall(r"(loss|accuracy) ([.\d]+)", ended.out)
    assert (float(found) if kind == "loss" else 1 - float(found)) < at_most


LARGE = """
import ctypes, re, resource

ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: freed layers go back to the system
LAYERS, WIDTH = 24, 1024
used = int(re.search(r"VmData:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
limit = used + 16 * LAYERS * WIDTH**2
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + torch.relu(self.inner(x))

with torch.device("meta"):
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
for layer in model:
    fully_shard(layer, mesh=replica.mesh())
fully_shard(model, mesh=replica.mesh())
model.to_empty(device="cpu")
torch.manual_seed(replica.rank)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.to_local().normal_(std=0.01)
optimizer = flockstep.distribute(model, torch.optim.AdamW(model.parameters(), 1e-3), "local_sgd(period=2)")
x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(flockstep.rank()))
losses = []
for _ in range(3):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), 2 * x)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
optimizer.finish()
assert losses[-1] < losses[0] / 2, losses
"""


@pytest.mark.full
@pytest.mark.parametrize("size", [1, 2])
def test_a_model_too_large_for_one_process_trains_sharded(tmp_path: Path, size: int) -> None:
    """With AdamW it needs 18 bytes for each parameter in one process and 14 in each of two, and may have 16."""
    ended = launched(tmp_path, LARGE, [*MEMORY, "-n", str(2 * size), "--replica-size", str(size)])
    if size == 2:
        assert ended.code == 0, ended.err
    else:
        assert ended.code == 1
        assert re.search(r"flockstep: worker [01] ran out of memory .* in a script with fully_shard and", ended.err)


NORM = """
mesh = replica.mesh(("dp", "tp"), (2, 2))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["dp"])
optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), 0.1), "all_reduce")
assert flockstep.clip_grad_norm_(optimizer, 1.0) == 0
torch.manual_seed(replica.rank // 2)
model(torch.randn(4, 8)).square().mean().backward()
whole = torch.cat([parameter.grad.full_tensor().flatten() for parameter in model.parameters()]).norm()
torch.testing.assert_close(flockstep.clip_grad_norm_(optimizer, float(whole) / 2), whole)
optimizer.step()
clipped = torch.cat([parameter.grad.full_tensor().flatten() for parameter in model.parameters()]).norm()
torch.testing.assert_close(clipped, whole / 2)
optimizer.finish()
"""


def test_a_norm_over_two_dimensions_of_a_mesh_is_that_of_the_whole_gradient(tmp_path: Path) -> None:
    ended = launched(tmp_path, NORM, ["-n", "4", "--replica-size", "4"])
    assert ended.code == 0, ended.err


DISTRIBUTES = """
case, strategy = sys.argv[1:]
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
if case == "placements":
    style = RowwiseParallel() if replica.index else ColwiseParallel()
    parallelize_module(model, replica.mesh(("tensor",)), {"0": style})
elif case == "mesh":
    from torch.distributed.device_mesh import init_device_mesh
    store = torch.distributed.FileStore(str(HERE / "store"), -1)
    torch.distributed.init_process_group("gloo", store=store, rank=flockstep.rank(), world_size=flockstep.workers())
    fully_shard(model, mesh=init_device_mesh("cpu", (flockstep.workers(),)))
elif case == "gradients":
    fully_shard(model[0], mesh=replica.mesh())
else:
    fully_shard(model, mesh=replica.mesh())
kind = torch.optim.LBFGS if case == "closure" else torch.optim.SGD
optimizer = flockstep.distribute(model, kind(model.parameters()), strategy)
if case == "gradients":
    model(torch.full((2, 8), float(flockstep.rank()))).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("case", "strategy", "said"),
    [
        ("placements", "all_reduce", r"0\.weight of shape \(8, 8\) as S\([01]\) .* instead of .* as S\([01]\)"),
        ("gradients", "all_reduce", r"1\.weight is held by several processes of a replica, which must compute equal"),
        ("mesh", "all_reduce", "DTensors must be over the mesh of the process's replica"),
        ("whole", "powersgd", "powersgd sends factors of whole matrices"),
        pytest.param("whole", "adpsgd", "adpsgd has background tasks", marks=pytest.mark.full),
        pytest.param("closure", "all_reduce", "LBFGS compares gradients over the whole", marks=pytest.mark.full),
    ],
)
def test_what_replicas_of_two_processes_cannot_do(tmp_path: Path, case: str, strategy: str, said: str) -> None:
    ended = launched(tmp_path, DISTRIBUTES, ["-n", "4", "--replica-size", "2"], case, strategy)
    assert ended.code == 2, ended.err
    assert re.fullmatch(rf"flockstep: .*{said}.*\n", ended.err), ended.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", "4", "--replica-size", "3"], "must be a multiple of --replica-size, got 4 workers"),
        (["-n", "4", "--replica-size", "2", "--max-gradient-norm", "1"], "do not work with --max-gradient-norm yet"),
    ],
)
def test_options_that_contradict_replicas(tmp_path: Path, words: list[str], said: str) -> None:
    ended = launched(tmp_path, "", words)
    assert ended.code == 2, ended.err
    assert re.fullmatch(rf"flockstep: .*{said}.*\n", ended.err), ended.err
