"""Users' PyTorch loops on several workers: what DDP does with them is the oracle."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.matrix import few
from support.processes import Ended, RealRun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")

BEFORE = """
import math, sys, warnings
from pathlib import Path
import torch
from torch import nn
import flockstep
from flockstep.runtime.node_spec import spec_from_environment

HERE = Path(__file__).parent
rank = spec_from_environment().address

def weights(values=(0.0, 0.0)):
    return nn.Parameter(torch.tensor(values))

class Model(nn.Module):
    def __init__(self, values=(0.0, 0.0)):
        super().__init__()
        self.w = weights(values)

def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

def batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 4, generator=generator) for _ in range(count)]

def loss(model, x):
    return (model(x) - x[:, :2]).square().mean()

def save(model):
    torch.save([p.detach() for p in model.parameters()], HERE / f"model-{rank}")

"""


def outcome(body: str, folder: Path, workers: int = 2, transport: str = "ipc") -> Ended:
    script = folder / "script.py"
    script.write_text(BEFORE + body)
    words = ["launch", "-n", str(workers), "--transport", transport, str(script)]
    return RealRun(words, folder / "run", torch=True).end(400)


def models(folder: Path, workers: int = 2) -> list[torch.Tensor]:
    """Each worker's parameters, as it saved them."""
    saved = [torch.load(folder / f"model-{rank}") for rank in range(workers)]
    return [torch.cat([p.flatten() for p in parameters]) for parameters in saved]


def trained(body: str, folder: Path, workers: int = 2, transport: str = "ipc") -> list[torch.Tensor]:
    ended = outcome(body, folder, workers, transport)
    assert (ended.code, "Warning" in ended.err) == (0, False), ended.err
    return models(folder, workers)


def defined() -> dict[str, Any]:
    """The functions of the scripts, for the same loop in this process."""
    exec(BEFORE.split("HERE")[0] + "def weights" + BEFORE.split("def weights")[1], names := {})
    return names


SEARCHING = """
torch.set_default_dtype(torch.float64)
model = network()
inner = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
optimizer = flockstep.distribute(model, inner, {strategy!r})
for x in batches(4):
    def closure():
        optimizer.zero_grad()
        found = loss(model, x[rank::2] * (1 + rank))
        found.backward()
        return found
    optimizer.step(closure)
optimizer.finish()
save(model)
state = inner.state[next(model.parameters())]
assert optimizer.loop.steps == state["func_evals"] > 20, state["func_evals"]
"""


JOINED = """
model = network()
inner = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
optimizer = flockstep.distribute(model, inner, "local_sgd(period=100)")
with optimizer.join():
    for x in batches(6 - 4 * rank, seed=1 + rank):
        optimizer.zero_grad()
        loss(model, x).backward()
        optimizer.step()
        after = model[0].weight.detach().clone()
changed = not torch.equal(after, model[0].weight)
(HERE / f"changed-{rank}").write_text(str(changed))
optimizer.finish()
"""


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a script that searches with L-BFGS by a strategy, and then joins uneven batches."""

    @functools.cache
    def run(strategy: str) -> Path:
        folder = tmp_path_factory.mktemp("searched")
        trained(SEARCHING.format(strategy=strategy) + "torch.set_default_dtype(torch.float32)\n" + JOINED, folder)
        return folder

    return run


@pytest.mark.parametrize("strategy", few(["all_reduce", "bucketed(cap=0.00008, first=0.00004)", "fused"], "all_reduce"))
def test_l_bfgs_searches_along_the_mean_loss_and_gradient_of_all_workers(
    strategy: str, searched: Callable[[str], Path]
) -> None:
    """One process on all batches takes the same steps."""
    found = models(searched(strategy))
    assert torch.equal(*found)
    names = defined()
    try:
        torch.set_default_dtype(torch.float64)
        model = names["network"]()
        inner = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
        for x in names["batches"](4):

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                inner.zero_grad()
                loss: torch.Tensor = sum(names["loss"](model, x[rank::2] * (1 + rank)) for rank in range(2)) / 2
                loss.backward()
                return loss

            inner.step(closure)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found[0], torch.cat([p.detach().flatten() for p in model.parameters()]))


PARTS = """
def parted(model, *also):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    rest = nn.ModuleList([nn.ParameterList(vectors), *also])
    optimizers = [
        flockstep.distribute(nn.ParameterList(matrices), torch.optim.SGD(matrices, lr=0.3, momentum=0.9), "all_reduce"),
        flockstep.distribute(rest, torch.optim.AdamW(vectors, lr=0.05), "all_reduce"),
    ]
    for x in batches(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(model, x[rank::2]).backward()
        for optimizer in optimizers:
            optimizer.step()
    for optimizer in optimizers:
        optimizer.finish()
    return model

save(parted(network()))

def statistics(own):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model[1].running_mean += rank
    return parted(model, *[] if own else [model[1]])[1].running_mean

torch.save([statistics(True), statistics(False)], HERE / f"statistics-{rank}")
"""


CLAMPED = """
def clamp(model):
    for p in model.parameters():
        p.data.clamp_(-0.2, 0.2)

for strategy in ("all_reduce", "local_sgd(period=2)"):
    model = network()
    clamp(model)
    optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.5), strategy)
    optimizer.register_step_post_hook(lambda *_: clamp(model))
    for x in batches(4):
        optimizer.zero_grad()
        loss(model, x[rank::2]).backward()
        optimizer.step()
    optimizer.finish()
    torch.save([p.detach() for p in model.parameters()], HERE / f"{strategy[:5]}-{rank}")
"""


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a script that trains models with two optimizers each, and then clamps weights in a hook."""
    folder = tmp_path_factory.mktemp("parted")
    trained(PARTS + CLAMPED, folder)
    return folder


def clamped(model: torch.nn.Module) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.2, 0.2)


def test_two_optimizers_of_one_model_step_as_in_one_process_on_all_batches(parted: Path) -> None:
    names = defined()
    model = names["network"]()
    halves = [[p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)]
    plain = [torch.optim.SGD(halves[0], lr=0.3, momentum=0.9), torch.optim.AdamW(halves[1], lr=0.05)]
    for x in names["batches"](5):
        model.zero_grad()
        names["loss"](model, x).backward()
        for optimizer in plain:
            optimizer.step()
    for found in models(parted):
        torch.testing.assert_close(found, torch.cat([p.detach().flatten() for p in model.parameters()]))


def test_only_the_buffers_of_a_module_given_to_distribute_are_sent_and_averaged(parted: Path) -> None:
    """Rank 1 adds 1 to its mean before `distribute`, of which 0.9^5 is left after five batches."""
    (own, common), (others, same) = (torch.load(parted / f"statistics-{rank}") for rank in range(2))
    assert torch.equal(common, same)
    assert not torch.allclose(own, others, atol=0.1)
    torch.testing.assert_close((own + others - 0.9**5) / 2, common)


def test_weights_clamped_in_a_hook_are_those_of_one_process(parted: Path) -> None:
    """Under local_sgd: the mean of two processes that clamp after every step, after every second step."""
    names = defined()
    one, replicas = names["network"](), [names["network"]() for _ in range(2)]
    for model in (one, *replicas):
        clamped(model)

    def step(model: torch.nn.Module, x: torch.Tensor) -> None:
        model.zero_grad()
        names["loss"](model, x).backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        clamped(model)

    for number, x in enumerate(names["batches"](4)):
        step(one, x)
        for rank, replica in enumerate(replicas):
            step(replica, x[rank::2])
        if number % 2:
            for pair in zip(*(replica.parameters() for replica in replicas), strict=True):
                mean = (pair[0].data + pair[1].data) / 2
                for p in pair:
                    p.data.copy_(mean)
    for name, model in (("all_r", one), ("local", replicas[0])):
        for rank in range(2):
            found = torch.load(parted / f"{name}-{rank}")
            torch.testing.assert_close(found, [p.detach() for p in model.parameters()])
            assert max(float(p.abs().max()) for p in found) == pytest.approx(0.2)


SCRIPT = """
import contextlib
from flockstep.strategies import all_reduce
all_reduce.SIZES = all_reduce.Bucketed(cap=0.00008, first=0.00004)
model = network()
inner = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
optimizer = flockstep.distribute(model, inner, {strategy!r})
stream = iter(batches(20, seed=1 + rank))

def done(phase):
    torch.save(torch.cat([p.detach().flatten() for p in model.parameters()]), HERE / f"{{phase}}-{{rank}}")

for _ in range(2):
    optimizer.zero_grad()
    loss(model, next(stream)).backward()
    norm = flockstep.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
(HERE / f"norm-{{rank}}").write_text(str(float(norm)))
done("clip")

optimizer.zero_grad()
for i in range(6):
    with contextlib.nullcontext() if i % 3 == 2 else optimizer.no_sync():
        (loss(model, next(stream)) / 3).backward()
    if i % 3 == 2:
        optimizer.step()
        model.zero_grad(set_to_none=i == 2)
done("no_sync")

if {scaler}:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for i in range(3):
        optimizer.zero_grad()
        value = loss(model, next(stream))
        scaler.scale(value * (math.inf if i == 1 and rank == 1 else 1.0)).backward()
        if i == 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 32.0, "after the overflow on rank 1"
done("scaler")

with optimizer.join(divide_by_initial_world_size={initial}):
    for _ in range(4 - 2 * rank):
        optimizer.zero_grad()
        loss(model, next(stream)).backward()
        optimizer.step()
done("join")
torch.save([s["momentum_buffer"] for s in inner.state.values()], HERE / f"momentum-{{rank}}")
optimizer.finish()
save(model)
"""


def plain(scaler: bool, initial: bool) -> dict[str, torch.Tensor]:
    """The same on one process: the mean over both workers' batches, as DDP has it; the parameters after each phase."""
    torch.manual_seed(0)
    nn = torch.nn
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    generators = [torch.Generator().manual_seed(1 + rank) for rank in range(2)]
    seen = {}

    def backward(generator: torch.Generator, share: float) -> None:
        x = torch.randn(8, 4, generator=generator)
        ((model(x) - x[:, :2]).square().mean() * share).backward()

    def done(phase: str) -> None:
        seen[phase] = torch.cat([p.detach().flatten() for p in model.parameters()])

    def both(turns: int = 1) -> None:
        optimizer.zero_grad()
        for generator in generators * turns:
            backward(generator, 0.5 / turns)

    for _ in range(2):
        both()
        seen["norm"] = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    done("clip")
    for _ in range(2):
        both(turns=3)
        optimizer.step()
    done("no_sync")
    for step in range(3 * scaler):
        both()
        if step != 1:
            optimizer.step()
    done("scaler")
    for step in range(4):
        active = generators[: 1 if step > 1 else 2]
        optimizer.zero_grad()
        for generator in active:
            backward(generator, 0.5 if initial else 1 / len(active))
        optimizer.step()
    done("join")
    return seen


@pytest.mark.parametrize(
    ("strategy", "scaler", "initial"),
    few(
        [("all_reduce", True, True), ("bucketed(cap=0.00008, first=0.00004)", False, False), ("bsp", True, False)],
        ("bucketed(cap=0.00008, first=0.00004)", False, False),
    ),
)
@pytest.mark.parametrize("transport", few(["ipc", "shared_memory"], "ipc"))
def test_a_loop_with_what_ddp_offers(
    strategy: str, scaler: bool, initial: bool, transport: str, tmp_path: Path
) -> None:
    """Clipping, accumulation, a scaler's skipped step and uneven batches: as on one process, after each of them."""
    results = trained(SCRIPT.format(strategy=strategy, scaler=scaler, initial=initial), tmp_path, transport=transport)
    expected = plain(scaler, initial)
    for phase in ("clip", "no_sync", "scaler", "join"):
        ours = [torch.load(tmp_path / f"{phase}-{rank}") for rank in range(2)]
        assert torch.equal(ours[0], ours[1]), phase
        torch.testing.assert_close(ours[0], expected[phase], atol=1e-5, rtol=1e-4, msg=phase)
    assert all(torch.equal(model, ours[0]) for model in results)
    norms = [float((tmp_path / f"norm-{rank}").read_text()) for rank in range(2)]
    if strategy == "bsp":
        assert all(norm != norm for norm in norms), "the server clips: a worker does not know the norm"
        return
    assert norms == pytest.approx([float(expected["norm"])] * 2, rel=1e-4)
    momenta = [torch.load(tmp_path / f"momentum-{rank}") for rank in range(2)]
    assert all(map(torch.equal, *momenta)), "what the optimizer remembers comes along"


OVERLAPPING = """
from flockstep.strategies import all_reduce, overlap_trial
overlap_trial.TRIED = 16

def begun(overlap, lr, model, strategy="all_reduce"):
    "An optimizer, and the steps in which parts of a gradient travel during the backward pass, if they may."
    all_reduce.SIZES = all_reduce.Bucketed(cap=0.00008, first=0.00004 if overlap else 1.0)
    inner = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=0.01)
    optimizer = flockstep.distribute(model, inner, strategy)
    sent, hand_over = [], optimizer.loop.hand_over
    optimizer.loop.hand_over = lambda: (sent.append(step), hand_over())
    return optimizer, sent

"""
REVISED = """
warnings.filterwarnings("ignore", "gradients were changed")
for overlap in (True, False):
    model, told = network(), []
    optimizer, sent = begun(overlap, 0.3, model)
    for step, x in enumerate(batches(16, seed=1 + rank)):
        optimizer.zero_grad()
        loss(model, x).backward()
        if step == {change} and rank == 1:
            {how}
        optimizer.step()
        told.append(float(optimizer.loop._worker.state.overlaps))
    HERE = Path(__file__).parent / str(overlap)
    (HERE / f"sent-{{rank}}").write_text(repr(sorted(set(sent))))
    (HERE / f"told-{{rank}}").write_text(repr(told))
    optimizer.finish()
    save(model)
"""
CHANGES = ["model[0].weight.grad.mul_(0.5)", "loss(model, x).backward()", "model[2].bias.grad = torch.ones(2)"]


@pytest.mark.parametrize("how", few(CHANGES, *CHANGES[:1]))
def test_gradients_travel_during_backward_until_a_script_changes_one(how: str, tmp_path: Path) -> None:
    """Every step has the bits of an exchange in step(), where the order of a sum of two cannot matter."""
    folders = [tmp_path / "True", tmp_path / "False"]
    for folder in folders:
        folder.mkdir()
    ended = outcome(OVERLAPPING + REVISED.format(change=11, how=how), tmp_path)
    assert (ended.code, "Warning" in ended.err) == (0, False), ended.err
    results = [model for folder in folders for model in models(folder)]
    kept = [[(at / f"{name}-{rank}").read_text() for name in ("sent", "told") for rank in range(2)] for at in folders]
    assert all(torch.equal(one, results[0]) for one in results)
    assert kept[1][:2] == ["[]", "[]"]
    assert kept[0][:2] == [repr(list(range(1, 12)))] * 2
    assert kept[0][2:] == [repr([1.0] * 11 + [0.0] * 5)] * 2


KEPT = """
for overlap in (True, False):
    model, means = network(), []
    optimizer, sent = begun(overlap, 0.05, model)
    for step, x in enumerate(batches(9, seed=1 + rank)):
        if step in (3, 6):
            model.zero_grad(set_to_none=step == 3)
        loss(model, x).backward()
        flockstep.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        means.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    optimizer.finish()
    means.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.save((sorted(set(sent)), means), HERE / f"means-{overlap}-{rank}")
    save(model)
"""


def test_after_a_step_gradients_are_the_mean_and_a_loop_may_add_to_them(tmp_path: Path) -> None:
    """As with DDP; a loop that sets no gradient to zero adds the next ones to the clipped mean of the last step."""
    trained(OVERLAPPING + KEPT, tmp_path)
    kept = [torch.load(tmp_path / f"means-{way}-{rank}") for way in (True, False) for rank in range(2)]
    assert [sent for sent, _ in kept] == [list(range(1, 9))] * 2 + [[]] * 2
    names = defined()
    model = names["network"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    parameters, expected = list(model.parameters()), []
    for step, pair in enumerate(zip(names["batches"](9, seed=1), names["batches"](9, seed=2), strict=True)):
        if step in (3, 6):
            model.zero_grad()
        for x in pair:
            (names["loss"](model, x) / 2).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        expected.append(torch.cat([p.grad.flatten() for p in parameters]))
    for _, means in kept:
        assert all(map(torch.equal, means, kept[0][1]))
    torch.testing.assert_close(kept[0][1], [*expected, expected[-1]], atol=1e-6, rtol=1e-4)


ABSENT = """
USED = [([0, 1], [0]), ([0], [0, 1]), ([0], [0]), ([1], []), ([0, -1], [0, -1]), ([0], [0, -1]), ([0], [0])]

class Gated(nn.Module):
    "Three networks and a gate; a script uses some of them in each step."

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(network() for _ in range(3))
        self.gate = nn.Parameter(torch.ones(()))

def used(model, x, parts):
    "The loss of some networks; -1 is the second one, with a gradient of -0, and also for the gate."
    terms = [loss(model.parts[abs(part)], x) * (1.0 if part >= 0 else -0.0 * model.gate) for part in parts]
    return sum(terms) + 0.0 * model.parts[0][0].weight.sum()

"""
LEFT_OUT = """
for name, overlap, strategy in {cases!r}:
    model = Gated()
    optimizer, _ = begun(overlap, 0.1, model, strategy)
    for step, x in enumerate(batches(len(USED), seed=1 + rank)):
        used(model, x, USED[step][rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(torch.cat([p.detach().flatten() for p in model.parameters()]), HERE / f"{{name}}-{{rank}}")
    optimizer.finish()  # makes the replicas equal
"""
CASES = [
    ("overlapping", True, "all_reduce"),
    ("small", False, "all_reduce"),
    ("bucketed", False, "bucketed(cap=0.00008, first=0.00004)"),
    ("fused", False, "fused"),
    ("two-way", False, "two_way(codec=identity, feedback=none)"),
    ("encoded", False, "decoupled_momentum(k=1, chunk=1)"),
]


def test_a_parameter_without_a_gradient_on_any_rank_is_skipped_as_by_ddp(tmp_path: Path) -> None:
    """Weight decay and momentum move a parameter that has a gradient of -0, and no parameter that has none."""
    ended = outcome(OVERLAPPING + ABSENT + LEFT_OUT.format(cases=CASES), tmp_path)
    assert (ended.code, "Warning" in ended.err) == (0, False), ended.err
    names = defined()
    exec(ABSENT, names)
    model = names["Gated"]()
    parameters = list(model.parameters())
    inner = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)
    counted = 0
    streams = [names["batches"](len(names["USED"]), seed=1 + rank) for rank in range(2)]
    for parts, *batches in zip(names["USED"], *streams, strict=True):
        for used, x in zip(parts, batches, strict=True):
            (names["used"](model, x, used) / 2).backward()
        counted += sum(one.grad is None for one in parameters)
        inner.step()
        inner.zero_grad()
    assert counted == 5 + 5 + 9 + 8 + 4 + 4 + 9
    expected = torch.cat([one.detach().flatten() for one in parameters])
    for name, _, _ in CASES:
        ours = [torch.load(tmp_path / f"{name}-{rank}") for rank in range(2)]
        assert torch.equal(*ours), name
        if name != "encoded":  # whose steps follow the signs of gradients
            torch.testing.assert_close(ours[0], expected, atol=1e-6, rtol=1e-5, msg=name)


CLIPPED = """
model = Model()
optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), {strategy!r})
for _ in range(2):
    optimizer.zero_grad()
    (model.w * torch.tensor([[10.0, 0.0], [0.0, 0.1]][rank])).sum().backward()
    norm = flockstep.clip_grad_norm_(optimizer, 1.0)
    optimizer.step()
(HERE / f"norm-{{rank}}").write_text(str(float(norm)))
optimizer.finish()
save(model)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "step", "norms"),
    [
        ("fused", [1.0, 0.01], [5.00025, 5.00025]),
        ("local_sgd(period=1)", [0.5, 0.05], [10.0, 0.1]),
        ("asgd", [1.0, 0.1], [10.0, 0.1]),
    ],
)
def test_what_is_clipped(strategy: str, step: list[float], norms: list[float], tmp_path: Path) -> None:
    """DDP clips the mean (5, 0.05) to (1, 0.01); where no gradient is combined, each worker's own one is clipped."""
    for model in trained(CLIPPED.format(strategy=strategy), tmp_path):
        torch.testing.assert_close(model, -2 * torch.tensor(step), atol=1e-4, rtol=1e-4)
    assert [float((tmp_path / f"norm-{rank}").read_text()) for rank in range(2)] == pytest.approx(norms, rel=1e-4)


@pytest.mark.full
def test_torchs_own_clipping_before_the_mean_is_told(tmp_path: Path) -> None:
    body = CLIPPED.format(strategy="all_reduce")
    ended = outcome(body.replace("flockstep.clip_grad_norm_(optimizer", "nn.utils.clip_grad_norm_([model.w]"), tmp_path)
    assert ended.code == 0
    assert ended.err.count("use flockstep.clip_grad_norm_(optimizer, max_norm), which clips the combined gradient") == 2


def test_a_replica_that_has_run_out_of_batches_is_averaged_and_does_not_step(
    searched: Callable[[str], Path],
) -> None:
    """The period is longer than the run: worker 1's momentum may not move its replica while worker 0 goes on."""
    folder = searched("all_reduce")
    assert [(folder / f"changed-{rank}").read_text() for rank in range(2)] == ["False", "False"]
