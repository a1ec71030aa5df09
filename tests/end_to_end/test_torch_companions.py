"""What stands beside the loop in users' scripts: compilers, loaders with processes, evaluations, process groups."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from end_to_end.test_torch_loops import defined, outcome, trained
from support.matrix import few

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")

TRAINED = """
optimizer = flockstep.distribute({given}, torch.optim.SGD({given}.parameters(), lr=0.1, momentum=0.9), {strategy!r})
for x in batches(10):
    optimizer.zero_grad()
    loss({called}, x[rank::2]).backward()
    optimizer.step()
optimizer.finish()
save(model)
"""
COMPILED = """
sys.meta_path[:] = [one for one in sys.meta_path if type(one).__name__ != "WithoutCompiler"]  # the tests' stand-in
sys.modules.pop("torch._dynamo", None)
vars(torch).pop("_dynamo", None)
model = network()
compiled = torch.compile(model, backend={backend!r})
"""


def alone(shares: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Parameters of one process that steps along the mean of the losses of `shares`, one sequence for each step."""
    model, loss = defined()["network"](), defined()["loss"]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for share in shares:
        sgd.zero_grad()
        (sum(loss(model, x) for x in share) / len(share)).backward()
        sgd.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def batches(count: int, seed: int = 1) -> list[torch.Tensor]:
    return defined()["batches"](count, seed)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("backend", "given", "strategy"),
    [
        pytest.param("aot_eager", "model", "all_reduce", marks=pytest.mark.full),
        pytest.param("eager", "compiled", "bucketed(cap=0.00008, first=0.00004)", marks=pytest.mark.full),
        pytest.param("inductor", "compiled", "ps", marks=pytest.mark.full),
    ],
)
def test_a_compiled_module_trains_as_the_module_itself(backend: str, given: str, strategy: str, tmp_path: Path) -> None:
    """Either of the two may be given to `distribute`."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    body = COMPILED.format(backend=backend) + TRAINED.format(given=given, called="compiled", strategy=strategy)
    body += "assert torch._dynamo.utils.counters['stats']['unique_graphs'] > 0\n"
    found = trained(body, tmp_path)
    want = alone([(x[0::2], x[1::2]) for x in batches(10)])
    torch.testing.assert_close(found, [want, want])


LOADED = """
from torch.utils.data import DataLoader, TensorDataset
model = network()
optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), {strategy!r})
loader = flockstep.shard(DataLoader(TensorDataset(torch.cat(batches(6))), batch_size=4, num_workers=2))
for epoch in range(2):
    for x, in loader:
        optimizer.zero_grad()
        loss(model, x).backward()
        optimizer.step()
    if flockstep.is_main():
        model.eval()
        with torch.no_grad():
            (HERE / f"held-out-{{epoch}}").write_text(str(float(loss(model, batches(1, seed=9)[0]))))
        model.train()
optimizer.finish()
save(model)
"""


@pytest.mark.parametrize("strategy", few(["all_reduce", "ps", "local_sgd(period=1)"], "all_reduce"))
def test_loaders_have_processes_and_one_rank_evaluates_alone(strategy: str, tmp_path: Path) -> None:
    found = trained(LOADED.format(strategy=strategy), tmp_path)
    whole = torch.cat(batches(6))
    steps = [(whole[0::2][start : start + 4], whole[1::2][start : start + 4]) for start in range(0, 24, 4)]
    if strategy != "local_sgd(period=1)":  # each rank has a momentum of its own there
        torch.testing.assert_close(found, [alone(steps * 2)] * 2)
        model = defined()["network"]()
        torch.nn.utils.vector_to_parameters(alone(steps), model.parameters())
        held_out = defined()["loss"](model, batches(1, seed=9)[0]).item()
        assert float((tmp_path / "held-out-0").read_text()) == pytest.approx(held_out, rel=1e-5)


GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{HERE / 'store'}", rank=rank, world_size=2)
model = network()
"""
MEASURED = """
seen = torch.tensor([float(rank)])
dist.all_reduce(seen)
assert seen.tolist() == [1.0]
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.full
@pytest.mark.parametrize("transport", ["ipc", "shared_memory"])
def test_a_scripts_own_group_stands_beside_the_run(transport: str, tmp_path: Path) -> None:
    body = GROUP + TRAINED.format(given="model", called="model", strategy="all_reduce") + MEASURED
    found = trained(body, tmp_path, transport=transport)
    want = alone([(x[0::2], x[1::2]) for x in batches(10)])
    torch.testing.assert_close(found, [want, want])


@pytest.mark.full
def test_statistics_that_torch_would_not_synchronize_are_refused(tmp_path: Path) -> None:
    body = """
model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))
flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "all_reduce")
"""
    ended = outcome(body, tmp_path)
    assert ended.code == 2, ended.err
    assert "SyncBatchNorm (1) needs a process group of torch.distributed over all 2 workers, without" in ended.err
