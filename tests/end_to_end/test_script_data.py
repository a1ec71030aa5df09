"""Who draws which batches in a launched script: the rank before the first draw, equal draws noticed, loaders split."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flockstep
from flockstep.errors import ConfigurationError
from support.launch_variables import OPENMPI, SRUN, TORCHRUN
from support.matrix import few
from support.processes import Ended, RealRun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")

SAMPLER = """
import json
from pathlib import Path
import torch
from torch import nn
import flockstep

HERE = Path(__file__).parent
text = torch.randint(7, (500,), generator=torch.Generator().manual_seed(5))
block, batch = 8, 4

def get_batch():
    start = torch.randint(len(text) - block, (batch,))
    x = torch.stack([text[i : i + block] for i in start])
    y = torch.stack([text[i + 1 : i + 1 + block] for i in start])
    return x, y

def model_of():
    return nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7))

def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())

"""
TRAIN = """
torch.manual_seed(1337 OFFSET)
model = model_of()
optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.5), STRATEGY)
for _ in range(6):
    loss = loss_of(model, *get_batch())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
optimizer.finish()
torch.save([p.detach() for p in model.parameters()], HERE / f"model-{flockstep.rank()}")
"""
WARNING = (
    r"flockstep: workers {ranks} computed the same gradient at step 1, so they draw the same batches; seed the random "
    r"order of the data with flockstep\.rank\(\), or give each worker a part of the data with flockstep\.shard\n"
)


def launched(body: str, folder: Path, workers: int = 2, *options: str) -> Ended:
    script = folder / "script.py"
    script.write_text(body)
    torch = "import torch" in body
    return RealRun(["launch", "-n", str(workers), *options, str(script)], folder / "run", torch=torch).end()


def sampled(folder: Path, offset: str, strategy: str = "all_reduce", workers: int = 2) -> Ended:
    return launched(SAMPLER + TRAIN.replace("OFFSET", offset).replace("STRATEGY", repr(strategy)), folder, workers)


def mean_over(seeds: list[int]) -> list[torch.Tensor]:
    """Plain PyTorch: what DDP makes of workers that draw from generators with these seeds."""
    space: dict[str, Any] = {"__file__": __file__}
    exec(SAMPLER, space)
    streams, model = [], None
    for seed in seeds:
        torch.manual_seed(seed)
        made = space["model_of"]()
        model = made if model is None else model
        streams.append(torch.get_rng_state())
    assert model is not None
    for _ in range(6):
        losses = []
        for i, state in enumerate(streams):
            torch.set_rng_state(state)
            losses.append(space["loss_of"](model, *space["get_batch"]()))
            streams[i] = torch.get_rng_state()
        gradients = torch.autograd.grad(torch.stack(losses).mean(), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.5 * gradient
    return [p.detach() for p in model.parameters()]


def test_a_script_knows_its_rank_before_the_first_draw(tmp_path: Path) -> None:
    ended = sampled(tmp_path, "+ flockstep.rank()")
    assert (ended.code, ended.out) == (0, "")
    assert "same gradient" not in ended.err
    found, alone = torch.load(tmp_path / "model-0"), mean_over([1337])
    for mine, expected in zip(found, mean_over([1337, 1338]), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
    assert not all(torch.allclose(mine, one, rtol=1e-3) for mine, one in zip(found, alone, strict=True))


@pytest.mark.full
def test_equal_draws_are_noticed_before_parts_of_gradients_are_added_up(tmp_path: Path) -> None:
    """Without a rank in the seed every worker computes what one worker would, and the sum of equal parts is equal."""
    ended = sampled(tmp_path, "", "bucketed(cap=0.0001, first=0.0001)")
    assert ended.code == 0, ended.err
    assert len(re.findall(WARNING.format(ranks="0 and 1"), ended.err)) == 1, ended.err
    for mine, alone in zip(torch.load(tmp_path / "model-0"), mean_over([1337]), strict=True):
        torch.testing.assert_close(mine, alone, rtol=1e-5, atol=1e-6)


NUMPY = """
import numpy as np
import flockstep
from flockstep.arrays.schema import Schema
from flockstep.runtime.loop import Loop
from flockstep.runtime.plan import LocalOptimizer
from flockstep.optimizers.sgd import SGD
from flockstep.strategies.base import Strategy

params, gradient, rank = np.zeros(20, np.float32), np.zeros(20, np.float32), flockstep.rank()
arguments = Schema.of({"w": (20,)}), Strategy.parse(STRATEGY), LocalOptimizer(SGD(lr=0.1), params), SGD(lr=0.1)
loop = Loop(params, gradient, *arguments)
random = np.random.default_rng(SEED)
for _ in range(4):
    loop.gradients[:] = SCALE * random.normal(size=20)
    loop.step()
loop.finish()
"""
DRAWS = [
    ("all_reduce", "0", "1", "0, 1 and 2"),
    ("asgd", "rank // 2", "1", "0 and 1"),
    ("local_sgd", "rank", "1", None),
    ("asgd", "0", "0", None),
    ("ensemble", "0", "np.nan", None),
]


@pytest.mark.parametrize(("strategy", "seed", "scale", "ranks"), few(DRAWS, DRAWS[1]))
def test_who_draws_alike_is_named(strategy: str, seed: str, scale: str, ranks: str | None, tmp_path: Path) -> None:
    """Gradients that differ, that are zero or that are not numbers are no alarm."""
    body = NUMPY.replace("STRATEGY", repr(strategy)).replace("SEED", seed).replace("SCALE", scale)
    ended = launched(body, tmp_path, 3)
    found = re.findall(WARNING.format(ranks=ranks), ended.err)
    assert (len(found), "same gradient" in ended.err) == ((0, False) if ranks is None else (1, True)), ended.err


def test_the_environment_says_who_a_script_is_and_torch_is_not_needed(tmp_path: Path) -> None:
    body = """
import sys
import flockstep
place = [flockstep.rank(), flockstep.workers()]
assert "torch" not in sys.modules
import json, os, subprocess
from pathlib import Path
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
code = "import flockstep; print(flockstep.rank(), flockstep.workers())"
child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()
said = [place, [int(one) for one in child], [int(os.environ[name]) for name in names]]
comm = flockstep.join()
(Path(__file__).parent / f"said-{comm.rank}").write_text(json.dumps(said))
"""
    assert launched(body, tmp_path, 2).code == 0
    said = [json.loads((tmp_path / f"said-{rank}").read_text()) for rank in range(2)]
    assert said == [[[rank, 2], [rank, 2], [rank, 2, rank, 2]] for rank in range(2)]


FOREIGN = {
    "another launcher": {"RANK": "1", "WORLD_SIZE": "4"},
    "mpirun": {"PMI_SIZE": "4", "PMI_RANK": "1"},
}
KNOWN = {"torchrun": TORCHRUN, "mpirun": OPENMPI, "srun": SRUN}


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


CALLS: dict[str, Callable[[], object]] = {
    "rank": flockstep.rank,
    "workers": flockstep.workers,
    "join": flockstep.join,
    "shard": lambda: flockstep.shard([1, 2]),
    "distribute": lambda: flockstep.distribute(*small(), "all_reduce"),
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in {name for one in (*FOREIGN.values(), *KNOWN.values()) for name in one}:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("launcher", FOREIGN)
@pytest.mark.parametrize("call", CALLS)
def test_a_script_of_another_launcher_does_not_train_once_per_process(
    call: str, launcher: str, environment: pytest.MonkeyPatch
) -> None:
    for name, value in FOREIGN[launcher].items():
        environment.setenv(name, value)
    said = rf"{launcher} started 4 processes.*flockstep launch -n 4 SCRIPT"
    with pytest.raises(ConfigurationError, match=said):
        CALLS[call]()


@pytest.mark.parametrize("launcher", KNOWN)
def test_a_known_launcher_tells_the_rank_before_the_run(launcher: str, environment: pytest.MonkeyPatch) -> None:
    for name, value in KNOWN[launcher].items():
        environment.setenv(name, value)
    assert (flockstep.rank(), flockstep.workers()) == (1, 4)
    assert list(flockstep.shard(range(8))) == [1, 5]


@pytest.mark.parametrize("given", [{}, {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}], ids=len)
def test_one_process_trains_alone_as_ever(given: dict[str, str], environment: pytest.MonkeyPatch) -> None:
    for name, value in given.items():
        environment.setenv(name, value)
    assert (flockstep.rank(), flockstep.workers()) == (0, 1)
    CALLS["distribute"]()
    assert list(flockstep.shard([1, 2])) == [1, 2]


@pytest.mark.parametrize(
    "rule", few(["k_async(2)", "backup(1)", "k_sync(2)", "k_batch_async(2)", "softsync"], "k_async(2)")
)
def test_ranks_do_not_wait_for_all_where_steps_wait_for_some(rule: str, tmp_path: Path) -> None:
    """Two that waited in the exchange left the third alone with a step that takes two gradients, for ever."""
    body = NUMPY.replace("STRATEGY", repr(f"ps({rule})")).replace("SEED", "rank").replace("SCALE", "1")
    ended = launched(body.replace("loop.finish()", "loop.common()\nloop.finish()"), tmp_path, 3)
    waits = rule in ("k_async(2)", "backup(1)", "k_sync(2)")
    assert ended.code == (2 if waits else 0), ended.err
    assert ("would delay the step; call it before the first step()" in ended.err) == waits, ended.err
