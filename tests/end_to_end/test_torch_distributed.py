"""torch.distributed under our strategies, and parts of gradients that travel while backward goes on."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flockstep.arrays.schema import slices
from flockstep.collectives.torch_distributed import TorchDistributed
from flockstep.errors import CompositionError, ConfigurationError
from flockstep.programs import Rendezvous
from flockstep.testing.strategies import equal_bits, run_strategy
from support.processes import Ended, RealRun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")


START = """
from pathlib import Path
import numpy as np
import torch
from torch import nn
import flockstep
from flockstep.runtime.node_spec import spec_from_environment

HERE = Path(__file__).parent
rank = spec_from_environment().address
torch.set_num_threads(1)

def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 40), nn.Tanh(), nn.Linear(40, 3))

def start(strategy, model=None):
    model = model_of() if model is None else model
    return model, flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), strategy)

def loss_of(model, step):
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + rank))
    return (model(x) - x[:, :3]).square().mean()
"""
SMALL = "cap=0.003, first=0.001"


def launched(body: str, folder: Path, workers: int = 3, heartbeat: float = 10) -> RealRun:
    script = folder / "script.py"
    script.write_text(START + body)
    options = ["-n", str(workers), "--heartbeat", str(heartbeat)]
    return RealRun(["launch", *options, str(script)], folder / "run", torch=True)


def succeeded(body: str, folder: Path, workers: int = 3) -> Ended:
    ended = launched(body, folder, workers).end()
    assert (ended.code, ended.out) == (0, ""), ended.err
    return ended


@pytest.mark.oracle("collective:torch_distributed")
def test_every_operation_equals_numpy_and_is_equal_in_every_bit(tmp_path: Path) -> None:
    body = """
from flockstep.collectives.torch_distributed import TorchDistributed

async def everything(me):
    c, results = TorchDistributed(), {}
    for name in ("float16", "float32", "float64", "int64"):
        for size in (1, 2, 7, 10007):
            given = np.random.default_rng([rank, size]).normal(size=size) * 5
            a = given.astype(name)
            await c.all_reduce(me, a)
            results[f"sum-{name}-{size}"] = a
    a = np.arange(11.0) + rank
    part, view = await c.reduce_scatter(me, a)
    results["scattered"], results["part"] = view.copy(), np.array([part.start, part.stop])
    results["gathered"] = np.concatenate(await c.all_gather(me, np.full(rank + 1, rank)))
    a = np.full(5, float(rank))
    await c.broadcast(me, a, 1)
    results["broadcast"] = a
    a = np.full(5, float(rank))
    await c.reduce(me, a, 2)
    results["reduced"] = a
    await c.barrier(me)
    np.savez(HERE / f"{rank}.npz", **results)

model, optimizer = start("all_reduce")
runner = optimizer.loop._runner
runner.aside(everything(runner.node))
optimizer.finish()
"""
    n = 3
    succeeded(body, tmp_path, n)
    results = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(n)]
    for name in ("float16", "float32", "float64", "int64"):
        for size in (1, 2, 7, 10007):
            given = [np.random.default_rng([rank, size]).normal(size=size) * 5 for rank in range(n)]
            exact = np.sum([one.astype(name).astype("float64") for one in given], 0)
            sums = [result[f"sum-{name}-{size}"] for result in results]
            assert equal_bits(*sums)
            eps = 0 if name == "int64" else np.finfo(name).eps
            assert np.allclose(sums[0].astype("float64"), exact, rtol=0, atol=40 * eps)
    parts = slices(11, n)
    for rank, result in enumerate(results):
        assert result["part"].tolist() == [parts[rank].start, parts[rank].stop]
        assert result["scattered"].tolist() == (3 * np.arange(11.0) + 3)[parts[rank]].tolist()
        assert result["gathered"].tolist() == [0, 1, 1, 2, 2, 2]
        assert result["broadcast"].tolist() == [1.0] * 5
    assert results[2]["reduced"].tolist() == [3.0] * 5


@pytest.mark.negative_control("collective:torch_distributed")
def test_sums_in_another_order_show() -> None:
    """So that equal bits above say something: what each rank adds up in an order of its own differs in some bit."""
    given = [(np.random.default_rng([rank, 10007]).normal(size=10007) * 5).astype("float32") for rank in range(3)]
    assert not equal_bits(given[0] + given[1] + given[2], given[1] + given[2] + given[0])


@pytest.mark.full
def test_all_reduce_and_bucketed_train_alike_and_the_bytes_are_booked(tmp_path: Path) -> None:
    body = """
model, optimizer = start("all_reduce(collective=torch_distributed)")
for step in range(6):
    optimizer.zero_grad()
    loss_of(model, step).backward()
    optimizer.step()
optimizer.finish()
np.save(HERE / f"{rank}.npy", optimizer.flat.params)
"""
    ended = succeeded(body, tmp_path)
    first = [np.load(tmp_path / f"{rank}.npy") for rank in range(3)]
    assert equal_bits(*first)
    size = len(first[0])
    assert ended.summary is not None
    assert ended.summary["scalars"]["bytes_by_formula"] == 6 * 3 * (2 * 2 * size * 4 // 3)
    (tmp_path / "buckets").mkdir()
    succeeded(body.replace("all_reduce(", f"bucketed({SMALL}, "), tmp_path / "buckets")
    second = [np.load(tmp_path / "buckets" / f"{rank}.npy") for rank in range(3)]
    assert equal_bits(*second)
    assert np.allclose(first[0], second[0], rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_a_scripts_own_group_is_used_and_kept(tmp_path: Path) -> None:
    body = """
import torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{HERE / 'store'}", rank=rank, world_size=2)
model, optimizer = start("all_reduce(collective=torch_distributed)")
loss_of(model, 0).backward()
optimizer.step()
optimizer.finish()
ours = torch.ones(3)
dist.all_reduce(ours)
assert ours.tolist() == [2.0] * 3
dist.destroy_process_group()
"""
    succeeded(body, tmp_path, 2)
    assert list((tmp_path / "run").glob(".torch*")) == []


@pytest.mark.parametrize(
    ("strategy", "kind", "what"),
    [
        (f"bucketed({SMALL}", signal.SIGKILL, "was killed by SIGKILL"),
        pytest.param("all_reduce", signal.SIGSTOP, "has not answered for", marks=pytest.mark.full),
    ],
)
def test_a_lost_worker_ends_the_run_with_a_sentence(
    tmp_path: Path, strategy: str, kind: signal.Signals, what: str
) -> None:
    inside = "(" if "(" not in strategy else ", "
    body = f"""
model, optimizer = start("{strategy}{inside}collective=torch_distributed)")
for step in range(10**9):
    optimizer.zero_grad()
    loss_of(model, step).backward()
    optimizer.step()
"""
    run = launched(body, tmp_path, workers=2, heartbeat=3)
    run.wait_for_work(20)
    run.fault(kind, "worker-1")
    ended = run.end()
    assert ended.code == 1
    assert re.fullmatch(rf"flockstep: worker 1 {what}[^\n]*\n", ended.err), ended.err


@pytest.mark.full
def test_a_declared_job_trains_with_it(tmp_path: Path) -> None:
    arguments = ["train", "softmax", "-s", "bucketed(cap=0.0004, first=0.0002, collective=torch_distributed)"]
    ended = RealRun([*arguments, "-n", "2", "--steps", "8"], tmp_path / "run", torch=True).end()
    assert ended.summary is not None, ended.err
    assert ended.summary["status"] == "finished", ended.err
    assert ended.summary["replicas_agree"] is True
    assert ended.summary["scalars"]["bytes_by_formula"] == 8 * 2 * 210 * 4  # each of two workers sends half, twice


def test_workers_of_several_hosts_are_refused(tmp_path: Path) -> None:
    """The group would meet through a file of one host."""
    meeting = Rendezvous(
        "run", tmp_path, 0, 2, lambda work: pytest.fail("it waits for the others"), lambda *given: None
    )
    me: Any = SimpleNamespace(rendezvous=meeting, hosts=((0,), (1,)), workers=2)
    with pytest.raises(
        ConfigurationError, match="makes a group only within one host, but the workers are on 2 hosts; leave"
    ):
        TorchDistributed()._group(me)


def test_virtual_time_refuses() -> None:
    with pytest.raises(CompositionError, match="use ring, which has the same cost"):
        run_strategy("all_reduce(collective=torch_distributed)", 2, 1)
    with pytest.raises(ConfigurationError, match="backend must be one of gloo, nccl, mpi"):
        run_strategy("all_reduce(collective=torch_distributed(backend=ucc))", 2, 1)


@pytest.mark.full
@pytest.mark.parametrize("accumulate", [1, 2])
def test_overlap_gives_the_bits_of_the_run_without_it(tmp_path: Path, accumulate: int) -> None:
    """Gradients from `torch.autograd.grad` complete no parameter, so that all parts are handed over by `step`."""
    body = f"""
def noted():
    handed.append(optimizer.loop.awaited)
    hand_over()

for overlap in (True, False):
    model, optimizer = start("bucketed({SMALL}, accumulate={accumulate})")
    handed, hand_over = [], optimizer.loop.hand_over
    optimizer.loop.hand_over = noted
    for step in range(7):
        model.zero_grad()  # to None: autograd makes new gradients
        if overlap:
            loss_of(model, step).backward()
        else:
            for p, g in zip(model.parameters(), torch.autograd.grad(loss_of(model, step), list(model.parameters()))):
                p.grad = g
        before = len(handed)
        optimizer.step()
        assert len(handed) == before, "step() itself has no need to"
    optimizer.finish()
    loss_of(model, 0).backward()  # after the end nobody listens
    np.save(HERE / f"{{overlap}}-{{rank}}.npy", optimizer.flat.params)
    (HERE / f"handed-{{overlap}}-{{rank}}").write_text(" ".join(map(str, handed)))
"""
    succeeded(body, tmp_path, 2)
    found = [np.load(tmp_path / f"{overlap}-{rank}.npy") for overlap in (True, False) for rank in range(2)]
    assert len((tmp_path / "handed-True-0").read_text().split()) == 7 // accumulate * 4
    assert (tmp_path / "handed-False-0").read_text() == ""
    assert equal_bits(*found)
