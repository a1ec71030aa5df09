"""What a script's model and optimizer hold beside the gradients: buffers, checkpoints, changes from outside."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import flockstep
from flockstep.errors import ConfigurationError
from support.matrix import few
from support.processes import Ended, RealRun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")


SCRIPT = """
import copy, sys
from pathlib import Path
import torch
from torch import nn
import flockstep
from flockstep.runtime.node_spec import spec_from_environment

HERE = Path(__file__).parent
rank = spec_from_environment().address

def batch(step, of=None, shift=0.0):
    stream = torch.Generator().manual_seed(1000 * step + (rank if of is None else of))
    x = torch.randn(8, 4, generator=stream) + shift
    return x, x[:, :2] - x[:, 2:]

def gradient(step, shift=0.0):
    x, y = batch(step, shift=shift)
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    return float(loss.detach())

def save(name, what):
    torch.save(what, HERE / f"{name}-{rank}")

torch.manual_seed(0)
"""
MODEL = "model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2))\n"
NET = SCRIPT + MODEL
PLAIN = SCRIPT + "model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))\n"


def outcome(body: str, folder: Path, workers: int = 2) -> Ended:
    script = folder / "script.py"
    script.write_text(body)
    return RealRun(["launch", "-n", str(workers), str(script)], folder / "run", torch=True).end()


def saved(folder: Path, name: str, workers: int = 2) -> list[Any]:
    return [torch.load(folder / f"{name}-{rank}") for rank in range(workers)]


def fine(ended: Ended) -> None:
    assert (ended.code, ended.out) == (0, ""), ended.err
    assert "Warning" not in ended.err


BATCH_NORM = """
optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "all_reduce"{policy})
for step in range(6):
    gradient(step, shift=3.0 * rank)
    optimizer.step()
save("own", [b.clone() for b in model.buffers()])
optimizer.finish()
save("buffers", list(model.buffers()))
model.eval()
save("evaluation", model(batch(99, of=5)[0]).detach())
"""


CONSENSUS = """
optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "adpsgd")
for step in range(12):
    gradient(step, shift=3.0 * rank)
    optimizer.step()
    if step % 3 == 2:
        with optimizer.consensus():
            save(f"common-{step}", copy.deepcopy(model.state_dict()))
optimizer.finish()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a script that trains two models with batch norm, one after the other."""
    folder = tmp_path_factory.mktemp("trained")
    fine(outcome(NET + BATCH_NORM.format(policy="") + MODEL + CONSENSUS, folder))
    return folder


def test_evaluation_is_equal_on_all_ranks_after_the_end(trained: Path) -> None:
    """The statistics are the mean of what each rank has seen, the count rank 0's: equal in every bit everywhere."""
    one, other = saved(trained, "evaluation")
    assert torch.equal(one, other)
    own, buffers = saved(trained, "own"), saved(trained, "buffers")
    assert not torch.allclose(own[0][0], own[1][0], atol=0.1)  # their data differ, so do their statistics
    for index in (0, 1):
        mean = ((own[0][index].double() + own[1][index].double()) / 2).float()
        assert torch.equal(buffers[0][index], mean)
        assert torch.equal(buffers[1][index], mean)
    assert [int(b[2]) for b in buffers] == [6, 6]


def test_replicas_are_averaged_in_the_background_while_ranks_agree_on_buffers(trained: Path) -> None:
    """The common model was taken for a change by the script, and updates that came meanwhile were undone after it."""
    for step in (2, 5, 8, 11):
        one, other = saved(trained, f"common-{step}")
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.full
def test_local_buffers_stay_where_they_are(tmp_path: Path) -> None:
    fine(outcome(NET + BATCH_NORM.format(policy=', buffers="local"'), tmp_path))
    own, buffers = saved(tmp_path, "own"), saved(tmp_path, "buffers")
    assert all(torch.equal(a, b) for r in (0, 1) for a, b in zip(own[r], buffers[r], strict=True))
    assert not torch.equal(buffers[0][0], buffers[1][0])


@pytest.mark.full
def test_buffers_of_rank_0_at_the_start_and_on_demand(tmp_path: Path) -> None:
    """Rank 0 alone has a checkpoint's statistics; two ranks with unequal numbers of steps; buffers exceed the model."""
    body = """
model.register_buffer("table", torch.full((4096,), float(rank)))
model.register_buffer("cache", torch.full((rank + 1,), float(rank)), persistent=False)
model.register_buffer("bank", torch.zeros(0, 4))
model.register_parameter("frozen", nn.Parameter(torch.full((40_000,), float(rank)), requires_grad=False))
with torch.no_grad():
    model[1].running_mean += 5.0 - 5 * rank
optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "asgd", buffers="rank0")
save("start", {**model.state_dict(), "cache": model.cache})
model.bank = torch.ones(3 + rank, 4)
for step in range(2 + 2 * rank):
    gradient(step)
    optimizer.step()
save("before", copy.deepcopy(model.state_dict()))
optimizer.sync_buffers()
save("after", model.state_dict())
model.table += rank
optimizer.finish()
save("end", model.state_dict())
"""
    ended = outcome(NET + body, tmp_path)
    assert (ended.code, ended.out, ended.err.count("buffer bank has changed its shape")) == (0, "", 2), ended.err
    start, before, after, end = (saved(tmp_path, name) for name in ("start", "before", "after", "end"))
    assert [s["1.running_mean"].tolist() for s in start] == [[5.0] * 3] * 2
    assert [(s["cache"].tolist(), float(s["frozen"].sum())) for s in start] == [([0.0], 0.0)] * 2
    assert [int(s["1.num_batches_tracked"]) for s in before] == [2, 4]
    assert [len(s["bank"]) for s in end] == [3, 4]
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked", "table"):
        assert torch.equal(after[0][name], before[0][name]), name
        assert torch.equal(after[1][name], before[0][name]), name
        assert torch.equal(end[0][name], end[1][name]), name


def test_an_unknown_policy_is_refused() -> None:
    model = torch.nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    said = "buffers must be mean, rank0 or local, got 'newest'; leave it out for mean"
    with pytest.raises(ConfigurationError, match=said):
        flockstep.distribute(model, sgd, "all_reduce", buffers="newest")  # type: ignore[arg-type]


@pytest.mark.full
def test_other_policies_for_buffers_on_other_ranks_are_refused(tmp_path: Path) -> None:
    """Without the check the ranks would wait for each other forever."""
    ended = outcome(NET + BATCH_NORM.format(policy=', buffers=["mean", "local"][rank]'), tmp_path)
    assert ended.code == 2
    assert (
        "must pass the same buffers argument to distribute, got 'local' on rank 1 and 'mean' on rank 0; pass"
        in ended.err
    )


TAKEN_UP = """
other = copy.deepcopy(model)
with torch.no_grad():
    for p in other.parameters():
        p += 1 + rank  # rank 0's is taken
optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum={momentum}), "{strategy}")
for step in range(7):
    gradient(step)
    optimizer.step()
model.load_state_dict(other.state_dict())
gradient(7)
try:
    optimizer.step()
except flockstep.errors.ConfigurationError as error:
    assert "call optimizer.sync()" in str(error), error
else:
    raise AssertionError("the change was not noticed")
optimizer.sync()
save("synced", model.state_dict())
for step in range(8, 8 + {steps}):
    gradient(step)
    optimizer.step()
with optimizer.consensus():
    save("common", copy.deepcopy(model.state_dict()))
optimizer.finish()
save("result", model.state_dict())
save("loaded", other.state_dict())
"""


def reached(start: dict[str, torch.Tensor], steps: range, workers: int, lr: float = 0.1) -> dict[str, torch.Tensor]:
    """Synchronous SGD in plain PyTorch: every step along the mean gradient of all workers."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    model.load_state_dict(start)
    for step in steps:
        model.zero_grad()
        for rank in range(workers):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * step + rank))
            ((model(x) - (x[:, :2] - x[:, 2:])).square().mean() / workers).backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p -= lr * p.grad
    return model.state_dict()


@pytest.mark.full
def test_a_loaded_checkpoint_is_taken_up(tmp_path: Path) -> None:
    """As PyTorch would go on from it; the common model is that of the end."""
    body = TAKEN_UP.replace("{strategy}", "ps(bsp, shards=2)").replace("{momentum}", "0.0").replace("{steps}", "4")
    fine(outcome(PLAIN + "import flockstep.errors\n" + body, tmp_path))
    loaded = saved(tmp_path, "loaded")[0]
    for synced in saved(tmp_path, "synced"):
        assert all(torch.equal(synced[name], loaded[name]) for name in loaded)
    right = reached(loaded, range(8, 12), 2)
    for name in ("common", "result"):
        for got in saved(tmp_path, name):
            assert all(torch.allclose(got[key], right[key], atol=1e-5) for key in right), (name, got, right)


def test_a_learning_rate_of_another_rank_is_not_replaced_in_silence(tmp_path: Path) -> None:
    body = 'flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=[0.1, 0.2][rank]), "all_reduce")\n'
    ended = outcome(PLAIN + body, tmp_path)
    assert ended.code == 2
    assert "got 0.1 on worker 0 and 0.2 on worker 1; give all workers the same optimizer" in ended.err


RESTARTED = """
import sys
import numpy as np
from pathlib import Path
from flockstep.arrays.schema import Schema
from flockstep.runtime.loop import Loop
from flockstep.runtime.node_spec import spec_from_environment
from flockstep.runtime.plan import LocalOptimizer
from flockstep.optimizers.sgd import SGD
from flockstep.strategies.base import Strategy

rank = spec_from_environment().address
params, gradient = np.full(24, 8.0, np.float32), np.zeros(24, np.float32)
arguments = Schema.of({"w": (24,)}), Strategy.parse("STRATEGY"), LocalOptimizer(SGD(lr=0.02), params), SGD(lr=0.02)
loop = Loop(params, gradient, *arguments)

def steps(count):
    for _ in range(count):
        loop.gradients[:] = params
        loop.step()

steps(9 + rank * UNEVEN)  # toward 0 from 8
assert (params < 8).all()
params[:] = -64 - rank
loop.restart(None)
assert (params == -64).all(), params
common = loop.common()
assert (common == -64).all(), common
steps(10)  # nothing of what was above 0 comes back
assert (params < 0).all(), params
assert (loop.common() < 0).all(), loop.common()
loop.finish()
assert (params < 0).all(), params
"""


@pytest.mark.parametrize(
    ("strategy", "uneven"),
    few(
        [
            ("easgd(2)", 3),
            ("hierarchical(1, asynchronous, asynchronous)", 2),
            ("gossip(1)", 3),
            ("ps(essp(2), shards=2)", 0),
            ("ps(k_async(2))", 0),
            ("ps(k_sync(1))", 0),
            ("ps(backup(0))", 0),
            ("ps(backup(1))", 0),
            ("slice_servers", 2),
            ("overlap_local_sgd(2)", 0),
            ("broadcast", 1),
            ("hogwild", 1),
        ],
        ("easgd(2)", 3),
        ("gossip(1)", 3),
    ),
)
def test_nothing_of_the_old_model_comes_back(strategy: str, uneven: int, tmp_path: Path) -> None:
    """Centers, caches, masses, ledgers and what is on its way hold positive numbers; the new model has none."""
    script = tmp_path / "script.py"
    script.write_text(RESTARTED.replace("STRATEGY", strategy).replace("UNEVEN", str(uneven)))
    ended = RealRun(["launch", "-n", "2", str(script)], tmp_path / "run").end()
    assert (ended.code, ended.out) == (0, ""), ended.err


GOES_ON = """
import flockstep.errors
inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = flockstep.distribute(model, inner, "ps(bsp, shards=2)")
for step in range(3):
    gradient(step)
    optimizer.step()
if rank == 0:  # one rank alone may ask
    save("checkpoint", (copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())))
for _ in range(2):
    for step in range(3, 6):
        gradient(step)
        optimizer.step()
    save("end", [p.detach().clone() for p in model.parameters()])
    if (HERE / f"first-{rank}").exists():
        break
    save("first", [p.detach().clone() for p in model.parameters()])
    while not (HERE / "checkpoint-0").exists():
        pass
    model_state, optimizer_state = torch.load(HERE / "checkpoint-0")
    model.load_state_dict(model_state)
    optimizer.load_state_dict(optimizer_state)
    optimizer.sync()
optimizer.finish()
"""


def test_a_run_with_servers_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Parameters and momentum of the servers, saved by rank 0 and loaded again: the same steps in every bit."""
    fine(outcome(PLAIN + GOES_ON, tmp_path))
    first, end = saved(tmp_path, "first"), saved(tmp_path, "end")
    assert all(torch.equal(a, b) for r in (0, 1) for a, b in zip(first[r], end[r], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first[0], first[1], strict=True))


LOADED_BY_RANK_0 = """
import flockstep.errors
model.append(nn.Linear(2, 20_000)).append(nn.Linear(20_000, 2))  # its state is longer than a message
inner = torch.optim.AdamW(model.parameters(), lr=0.05)
optimizer = flockstep.distribute(model, inner, "all_reduce")
for step in range(3):
    gradient(step)
    optimizer.step()
if rank == 0:
    other = copy.deepcopy(inner.state_dict())
    other["param_groups"][0]["lr"] = 0.02
    for own in other["state"].values():
        own["exp_avg"].fill_(1.0)
    optimizer.load_state_dict(other)
    gradient(3)
    try:
        optimizer.step()
    except flockstep.errors.ConfigurationError as error:
        assert "call optimizer.sync() on every rank" in str(error), error
    else:
        raise AssertionError("the change was not noticed")
optimizer.sync()
save("synced", copy.deepcopy(inner.state_dict()))
for step in range(4, 7):
    gradient(step)
    optimizer.step()
save("model", list(model.parameters()))
optimizer.finish()
"""


@pytest.mark.full
def test_a_state_that_rank_0_alone_has_loaded_is_everyones(tmp_path: Path) -> None:
    """Replicas that step themselves along one gradient parted in silence: their optimizers remembered other things."""
    fine(outcome(PLAIN + LOADED_BY_RANK_0, tmp_path))
    for state in saved(tmp_path, "synced"):
        assert state["param_groups"][0]["lr"] == 0.02
        assert all((own["exp_avg"] == 1).all() for own in state["state"].values())
    assert all(map(torch.equal, *saved(tmp_path, "model")))


LAST = (
    RESTARTED[: RESTARTED.index("steps(9")].replace("SGD(lr=0.02)", "SGD(lr=0.001, momentum=0.9)")
    + """
loop.gradients[:] = 1
while UNEVEN and rank == 1 and not (Path(__file__).parent / "done").exists():
    pass
for step in range(1 + UNEVEN * rank):
    loop.gradients[:] = 1
    loop.step()
(Path(__file__).parent / "done").touch()
state = loop.finish(remember=rank == 0)
if rank == 0:
    velocity = sum(0.9**k for k in range(GRADIENTS))
    np.testing.assert_allclose(state.slots["momentum"], velocity, rtol=1e-4)
"""
)


@pytest.mark.parametrize(
    ("strategy", "uneven", "gradients"),
    few([("asgd", 40, 42), ("ps(ssp(3, weight=sum))", 40, 42), ("ps(bsp, shards=4)", 0, 1)], ("asgd", 40, 42)),
)
def test_what_servers_remember_is_kept_as_it_is_in_the_end(
    strategy: str, uneven: int, gradients: int, tmp_path: Path
) -> None:
    """Rank 0 ends after one step, before the other begins: a momentum of all gradients goes with their result.

    Under ssp the other's clock goes on although rank 0 waits for the end. Of four servers, those that have answered
    leave while rank 0 waits for the others.
    """
    script = tmp_path / "script.py"
    body = LAST.replace("STRATEGY", strategy).replace("UNEVEN", str(uneven)).replace("GRADIENTS", str(gradients))
    script.write_text(body)
    ended = RealRun(["launch", "-n", "2", str(script)], tmp_path / "run").end()
    assert (ended.code, ended.out) == (0, ""), ended.err


RATES = (
    RESTARTED[: RESTARTED.index("def steps")].replace("loop = ", "stepper = arguments[2]\nloop = ")
    + """
for step in range(8):
    if step == 4:
        loop.restart(None)
        stepper.lr = [0.125, 0.25][rank]
    loop.gradients[:] = 1 + rank
    loop.step()
loop.finish()
"""
)


DIFFER = "0.125 on worker 0 and 0.25 on worker 1 at step 5"


@pytest.mark.parametrize(
    ("strategy", "code", "told"),
    few(
        [("all_reduce", 2, f"all workers of all_reduce step along the same gradient, got {DIFFER}"),
         ("dpsgd(ring)", 0, f"has changed to {DIFFER}")],
        ("all_reduce", 2, f"all workers of all_reduce step along the same gradient, got {DIFFER}"),
    ),
)  # fmt: skip
def test_a_schedule_that_rank_0_alone_has_loaded_is_told_of(
    strategy: str, code: int, told: str, tmp_path: Path
) -> None:
    """Optimizers are given what rank 0 has loaded, schedulers are not: replicas that are to be equal have parted."""
    script = tmp_path / "script.py"
    script.write_text(RATES.replace("STRATEGY", strategy))
    ended = RealRun(["launch", "-n", "2", str(script)], tmp_path / "run").end()
    assert ended.code == code, ended.err
    assert told in ended.err


def test_an_optimizer_without_a_learning_rate_steps_as_in_one_process(tmp_path: Path) -> None:
    """Two ranks with equal batches, each against a plain loop; no group of the optimizer has a value `lr`."""
    body = PLAIN + (
        "class Fixed(torch.optim.Optimizer):\n"
        "    def step(self, closure=None):\n"
        "        with torch.no_grad():\n"
        "            for group in self.param_groups:\n"
        "                for p in group['params']:\n"
        "                    p.sub_(p.grad.sign(), alpha=group['size'])\n"
        "def train(model, optimizer):\n"
        "    for step in range(4):\n"
        "        optimizer.zero_grad()\n"
        "        (model(torch.arange(12.0).reshape(3, 4) + step) - 1).square().mean().backward()\n"
        "        optimizer.step()\n"
        "other = copy.deepcopy(model)\n"
        "train(other, Fixed(other.parameters(), {'size': 0.01}))\n"
        "optimizer = flockstep.distribute(model, Fixed(model.parameters(), {'size': 0.01}), 'all_reduce')\n"
        "train(model, optimizer)\n"
        "optimizer.finish()\n"
        "for a, b in zip(model.parameters(), other.parameters(), strict=True):\n"
        "    assert torch.equal(a, b), (a, b)\n"
    )
    ended = outcome(body, tmp_path)
    assert ended.code == 0, ended.err


@pytest.mark.parametrize(("model", "warned"), few([(NET, 1), (PLAIN, 0)], (NET, 1)))
def test_statistics_that_differ_are_told_of_where_a_script_does_not_finish(
    model: str, warned: int, tmp_path: Path
) -> None:
    """Parameters are equal under all_reduce; running means of batch normalization are not until `finish`."""
    body = model + (
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "optimizer = flockstep.distribute(model, optimizer, strategy='all_reduce')\n"
        "for step in range(2):\n    gradient(step)\n    optimizer.step()\n"
    )
    ended = outcome(body, tmp_path)
    assert ended.code == 0, ended.err
    assert ended.err.count("the script ended without optimizer.finish()") == warned


@pytest.mark.parametrize("end", ["", "returned.finish()\n"])
def test_an_optimizer_that_distribute_returned_and_nobody_used_ends_the_run(end: str, tmp_path: Path) -> None:
    """Each worker trains alone then, and its gradients reach no other."""
    body = PLAIN + (
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "returned = flockstep.distribute(model, optimizer, strategy='all_reduce')\n"
        "gradient(0)\noptimizer.step()\n"
    )
    ended = outcome(body + end, tmp_path)
    assert ended.code == 2, ended.err
    assert ended.err.count("took no step with the optimizer that flockstep.distribute returned") == 1


def test_settings_that_part_before_the_end_are_told_of_and_so_are_the_unequal_parameters(tmp_path: Path) -> None:
    """Settings are compared at steps 20 and 30, and at the end."""
    body = (
        PLAIN
        + """
returned = optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "all_reduce")
for step in range(24):
    if step == 21 and rank == 1:
        optimizer.param_groups[0]["lr"] = 0.2
    gradient(step)
    optimizer.step()
optimizer.finish()
"""
    )
    ended = outcome(body, tmp_path)
    assert ended.code == 0, ended.err
    assert "lr of SGD has changed to 0.1 on worker 0 and 0.2 on worker 1 at step 25; if this is not meant" in ended.err
    assert ended.summary is not None
    assert not ended.summary["replicas_agree"]
    (said,) = ended.summary["notes"]
    assert said.startswith("The workers ended with different parameters, although all_reduce keeps the parameters of ")
    assert f"flockstep: {said}" in ended.err
