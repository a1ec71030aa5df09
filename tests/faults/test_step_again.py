"""Workers of a script die at any message of a step: the others go on behind this step, which is taken exactly once."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Sequence
from itertools import chain, combinations
from pathlib import Path

import numpy as np
import pytest

from flockstep.cli.app import run as run_command
from flockstep.records.events import StepEvent
from flockstep.records.folder import RunFolder
from support.matrix import few
from support.processes import PATIENCE, Ended, RealRun, wait_until
from support.torch_scripts import end_scheduled_script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes by their names in /proc")

WORKERS, STEPS, DEADLY = 4, 24, 9
RATE, MOMENTUM = 0.1, 0.5
SCRIPT = f"""
import os, signal, sys
from pathlib import Path
import numpy as np
import torch
import flockstep
from flockstep.records import failpoints

HERE, me = Path(__file__).parent, flockstep.rank()
dies_at, dies_in_meeting = dict(eval(sys.argv[2])), eval(sys.argv[3])
model = torch.nn.Linear(6, 2, bias=False)
torch.nn.init.constant_(model.weight, 0.25)
optimizer = torch.optim.SGD(model.parameters(), lr={RATE}, momentum={MOMENTUM})
optimizer = flockstep.distribute(model, optimizer, sys.argv[1])
reached, met = 0, 1

def hook(name):
    global reached, met
    met += name == "meeting.begun"
    reached += step == {DEADLY}
    if (step == {DEADLY} and reached == dies_at.get(me)) or (met == 2 and me in dies_in_meeting):
        os.kill(os.getpid(), signal.SIGKILL)

step = 0
failpoints.hooks.append(hook)
for step in range({STEPS}):
    stream = np.random.default_rng((me, step))
    x, y = (torch.from_numpy(stream.standard_normal(shape).astype(np.float32)) for shape in ((5, 6), (5, 2)))
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()
    (HERE / f"step-{{me}}").write_text(str(step))
optimizer.finish()
momentum = optimizer.state[model.weight]["momentum_buffer"]
np.save(HERE / f"end-{{me}}.npy", np.stack([model.weight.detach().numpy(), momentum.numpy()]))
print(flockstep.rank(), "of", flockstep.workers())
"""


def run(
    folder: Path,
    strategy: str,
    dies_at: dict[int, int],
    in_meeting: Sequence[int] = (),
    *more: str,
    script: str = SCRIPT,
) -> Ended:
    file = folder / "script.py"
    file.write_text(script)
    words = ["launch", "-n", str(WORKERS), "--min-workers", "1", *more, str(file), strategy]
    return RealRun([*words, str(dies_at), str(list(in_meeting))], folder / "run", torch=True).end()


def gradient_of(rank: int, step: int, weights: np.ndarray) -> np.ndarray:
    stream = np.random.default_rng((rank, step))
    x, y = (stream.standard_normal(shape).astype(np.float32) for shape in ((5, 6), (5, 2)))
    return 2 / y.size * (x @ weights.T - y).T @ x


def trained(members: Sequence[Sequence[int]]) -> np.ndarray:
    """Weights and momentum after steps that use the gradients of these members, by their first ranks."""
    weights, velocity = np.full((2, 6), 0.25), np.zeros((2, 6))
    for step, used in enumerate(members):
        velocity = MOMENTUM * velocity + np.mean([gradient_of(rank, step, weights) for rank in used], axis=0)
        weights = weights - RATE * velocity
    return np.stack([weights, velocity])


def check(folder: Path, ended: Ended, dead: Sequence[int], exact: bool = True) -> None:
    """The survivors have equal bits. With an `exact` strategy, they have taken the step with the gradients of all who
    lived, or of more.
    """
    assert ended.code == 0, ended.err
    survivors = [rank for rank in range(WORKERS) if rank not in dead]
    ends = {int(file.stem.removeprefix("end-")): np.load(file) for file in folder.glob("end-*.npy")}
    assert set(ends) == set(survivors)
    assert len({array.tobytes() for array in ends.values()}) == 1
    possible = [[*survivors, *more] for n in range(len(dead) + 1) for more in combinations(dead, n)]
    before, after = [list(range(WORKERS))] * DEADLY, [survivors] * (STEPS - DEADLY - 1)
    found = ends[survivors[0]]
    fits = [np.allclose(found, trained([*before, last, *after]), rtol=0, atol=1e-5) for last in possible]
    assert fits.count(True) == 1 or not exact
    record = RunFolder(folder / "run")
    assert record.read_config().workers == len(survivors)
    steps = [event.step for event in record.read_events() if isinstance(event, StepEvent) and event.rank == 0]
    assert steps == list(range(1, STEPS + 1)) or 0 in dead


RING = "all_reduce(collective=ring)"


@pytest.mark.parametrize("point", few(range(1, 15), 1, 4, 9))
def test_a_worker_dies_at_a_message_of_a_ring(point: int, tmp_path: Path) -> None:
    check(tmp_path, run(tmp_path, RING, {1: point}), [1])


@pytest.mark.parametrize("point", few(range(1, 12), 5))
@pytest.mark.parametrize("strategy", ["all_reduce", "bucketed", "two_way(codec=identity, feedback=none)", "fused"])
def test_worker_0_dies_in_a_step_of_another_strategy(strategy: str, point: int, tmp_path: Path) -> None:
    ended = run(tmp_path, strategy, {0: point})
    if "end-0.npy" not in {file.name for file in tmp_path.iterdir()}:  # steps with fewer messages do not reach it
        check(tmp_path, ended, [0])


CODED = [
    "powersgd(rank=1)",
    "majority_vote(momentum=0.9)",
    "decoupled_momentum",
    "all_reduce(codec=topk(0.2), feedback=residual)",
    "two_way",
]


@pytest.mark.parametrize("point", few([1, 3, 5, 7], 5))
@pytest.mark.parametrize("strategy", few(CODED, "powersgd(rank=1)"))
def test_a_worker_dies_in_a_step_whose_gradients_are_encoded(strategy: str, point: int, tmp_path: Path) -> None:
    check(tmp_path, run(tmp_path, strategy, {3: point}), [3], exact=False)


@pytest.mark.parametrize("point", few(range(1, 14), 3, 9))
def test_a_worker_dies_in_a_round_of_local_steps(point: int, tmp_path: Path) -> None:
    """Local steps stay as they are, and the exchange at the end of the round is completed by all who live, or by
    nobody.
    """
    period = DEADLY + 1
    ended = run(tmp_path, f"local_sgd({period}, collective=ring)", {1: point})
    assert ended.code == 0, ended.err
    survivors, possible = [0, 2, 3], []
    for last in (survivors, list(range(WORKERS))):
        replicas = {rank: (np.full((2, 6), 0.25), np.zeros((2, 6))) for rank in range(WORKERS)}
        for step in range(STEPS):
            for rank, (weights, velocity) in replicas.items():
                velocity = MOMENTUM * velocity + gradient_of(rank, step, weights)
                replicas[rank] = weights - RATE * velocity, velocity
            if (step + 1) % period == 0 or step + 1 == STEPS:
                used = last if step + 1 == period else survivors
                mean = np.mean([replicas[rank][0] for rank in used], axis=0)
                replicas = {rank: (mean, velocity) for rank, (_, velocity) in replicas.items()}
        possible.append(replicas)
    ends = {rank: np.load(tmp_path / f"end-{rank}.npy") for rank in survivors}
    assert len({array[0].tobytes() for array in ends.values()}) == 1
    fits = [all(np.allclose(ends[r], np.stack(one[r]), rtol=0, atol=1e-5) for r in survivors) for one in possible]
    assert fits.count(True) == 1


def test_a_worker_that_hangs_is_left_out(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("os.getpid(), signal.SIGKILL", "os.getpid(), signal.SIGSTOP"))
    words = ["launch", "-n", str(WORKERS), "--min-workers", "1", "--heartbeat", "2", str(script), RING]
    check(tmp_path, RealRun([*words, "{2: 6}", "[]"], tmp_path / "run", torch=True).end(), [2])


def test_a_worker_dies_in_a_sum_in_shared_memory(tmp_path: Path) -> None:
    check(tmp_path, run(tmp_path, "all_reduce", {2: 1}, (), "--transport", "shared_memory"), [2])


@pytest.mark.parametrize(("one", "other"), few([(1, 1), (3, 9), (7, 5)], (3, 9)))
def test_two_workers_die_in_one_step(one: int, other: int, tmp_path: Path) -> None:
    check(tmp_path, run(tmp_path, RING, {1: one, 3: other}), [1, 3])


@pytest.mark.parametrize("rank", few(range(4), 0, 3))
def test_a_worker_dies_while_the_others_meet_again(rank: int, tmp_path: Path) -> None:
    dead = (rank + 1) % WORKERS
    check(tmp_path, run(tmp_path, RING, {dead: 6}, [rank]), [dead, rank])


EVERY_STEP = SCRIPT.replace(f"reached += step == {DEADLY}", "reached += 1").replace(f"step == {DEADLY} and ", "")


@pytest.mark.parametrize("seed", few(range(334), 0, 1))
def test_three_of_four_workers_die_at_moments_that_a_seed_draws(seed: int, tmp_path: Path) -> None:
    """1,002 deaths in all; no run is lost while one worker lives."""
    draw = np.random.default_rng(seed)
    strategy = str(draw.choice([RING, "all_reduce", "bucketed", "fused", "two_way", *CODED]))
    dies_at = {int(rank): int(draw.integers(1, 61)) for rank in draw.permutation(WORKERS)[:3]}
    ended = run(tmp_path, strategy, dies_at, script=EVERY_STEP)
    assert ended.code == 0, (strategy, dies_at, ended.err)
    ends = {int(file.stem.removeprefix("end-")): file.read_bytes() for file in tmp_path.glob("end-*.npy")}
    assert set(ends) >= set(range(WORKERS)) - set(dies_at), (strategy, dies_at)
    assert len(set(ends.values())) == 1, (strategy, dies_at)
    assert RunFolder(tmp_path / "run").read_config().workers == len(ends)


def test_a_worker_that_gets_sigterm_leaves_and_no_step_is_repeated(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("optimizer.zero_grad()", "optimizer.zero_grad(); import time; time.sleep(0.1)"))
    words = ["launch", "-n", str(WORKERS), "--min-workers", "1", str(script), RING, "{}", "[]"]
    run = RealRun(words, tmp_path / "run", torch=True)
    run.wait_for_work(3)
    run.fault(signal.SIGTERM, "worker-2")
    record = RunFolder(tmp_path / "run")
    wait_until(lambda: record.read_config().workers == 3 or not run.going(), PATIENCE, "the others go on")
    ended = run.end()
    assert ended.code == 0, ended.err
    assert ended.err == "flockstep: worker 2 left after SIGTERM; the other workers continued with the step in hand\n"
    assert len({(tmp_path / f"end-{rank}.npy").read_bytes() for rank in (0, 1, 3)}) == 1
    steps = [event.step for event in record.read_events() if isinstance(event, StepEvent) and event.rank == 0]
    assert steps == list(range(1, STEPS + 1))


OWN_STEPS = """
class Counting(torch.optim.SGD):
    def step(self, closure=None):
        group = self.param_groups[0]
        group["count"] = group.get("count", 0) + 1
        return super().step(closure)

model = torch.nn.Linear(6, 2, bias=False)
torch.nn.init.constant_(model.weight, 0.25)
optimizer = Counting(model.parameters(), lr=0.1, momentum=0.5)
hooked = []
optimizer.register_step_post_hook(lambda *given: hooked.append(1))
"""


@pytest.mark.parametrize("point", few([7, 8, 9, 10], 9))
def test_a_worker_that_catches_up_takes_the_step_with_its_own_optimizer(point: int, tmp_path: Path) -> None:
    begin, end = SCRIPT.index("model = "), SCRIPT.index("optimizer = flockstep")
    clipped = "flockstep.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)\n    optimizer.step()"
    text = SCRIPT[:begin] + OWN_STEPS + SCRIPT[end:].replace("optimizer.step()", clipped)
    text += '(HERE / f"counts-{me}").write_text(f"{optimizer.param_groups[0][\'count\']} {len(hooked)}")\n'
    (tmp_path / "script.py").write_text(text)
    words = ["launch", "-n", str(WORKERS), "--min-workers", "1", str(tmp_path / "script.py"), RING]
    check(tmp_path, RealRun([*words, str({1: point}), "[]"], tmp_path / "run", torch=True).end(), [1], exact=False)
    assert {(tmp_path / f"counts-{rank}").read_text() for rank in (0, 2, 3)} == {f"{STEPS} {STEPS}"}


def test_all_exchange_after_a_death_in_sync(tmp_path: Path) -> None:
    synced = f"if step == {DEADLY} + 1: optimizer.sync()\n    optimizer.zero_grad()"
    dying = SCRIPT.replace(f"step == {DEADLY} and reached", f"step == {DEADLY} + 1 and reached")
    script = dying.replace(f"+= step == {DEADLY}", f"+= step == {DEADLY} + 1").replace("optimizer.zero_grad()", synced)
    (tmp_path / "script.py").write_text(script)
    words = ["launch", "-n", str(WORKERS), "--min-workers", "1", str(tmp_path / "script.py"), RING, "{1: 2}", "[]"]
    check(tmp_path, RealRun(words, tmp_path / "run", torch=True).end(), [1], exact=False)


LARGE = """
import os, sys, time
from pathlib import Path
import torch
import flockstep
from flockstep.runtime import member

me = flockstep.rank()
model = torch.nn.Linear(4096, 1024, bias=False)
optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01), "all_reduce")
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(1, 4096)).square().mean().backward()
    optimizer.step()
send = member.Member.send_in_parts
if me == 0:
    def announced(self, note, arrays):
        Path(sys.argv[1], "sends").touch()
        while not Path(sys.argv[1], "died").exists():
            time.sleep(0.01)
        time.sleep(0.5)  # the launcher has turned to those who go on
        send(self, note, arrays)
    member.Member.send_in_parts = announced
else:
    while not Path(sys.argv[1], "sends").exists():
        time.sleep(0.01)
if me == 1:
    Path(sys.argv[1], "died").touch()
    os.kill(os.getpid(), 9)
if me == 2:
    time.sleep(2)  # the others are in finish() meanwhile
optimizer.finish()
print("end", flush=True)
"""


def test_a_worker_dies_while_another_sends_a_large_model(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LARGE)
    words = ["launch", "-n", "3", "--min-workers", "1", str(tmp_path / "script.py"), str(tmp_path)]
    ended = RealRun(words, tmp_path / "run", torch=True).end()
    assert (ended.code, ended.out.count("end")) == (0, 2), ended.err


BETWEEN = """
import os, signal, sys
from pathlib import Path
import torch
import flockstep
from flockstep.records import failpoints

HERE, me = Path(__file__).parent, flockstep.rank()
data = torch.utils.data.TensorDataset(torch.arange(48.0)[:, None] / 48)
loader = flockstep.shard(torch.utils.data.DataLoader(data, batch_size=2, shuffle=True))
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
optimizer = flockstep.distribute(model, optimizer, "all_reduce(collective=ring)")
step = reached = 0

def hook(name):
    global reached
    reached += step == 7
    if me == 1 and reached == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)

failpoints.hooks.append(hook)
for epoch in range(3):
    batches = 0
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        step, batches = step + 1, batches + 1
    (HERE / f"batches-{epoch}-{me}").write_text(str(batches))
optimizer.finish()
"""


@pytest.mark.parametrize("point", few(range(5, 10), 7))
def test_an_epoch_that_some_have_begun_before_a_death_is_dealt_alike(point: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(BETWEEN)
    words = ["launch", "-n", "3", "--min-workers", "1", str(tmp_path / "script.py"), str(point)]
    ended = RealRun(words, tmp_path / "run", torch=True).end()
    assert ended.code == 0, ended.err
    for epoch in range(3):
        assert len({(tmp_path / f"batches-{epoch}-{rank}").read_text() for rank in (0, 2)}) == 1


SHARDED = """
import os, signal
from pathlib import Path
import torch
import flockstep

HERE, me = Path(__file__).parent, flockstep.rank()
data = torch.utils.data.TensorDataset(torch.arange(48.0)[:, None])
plain = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
weighted = torch.utils.data.WeightedRandomSampler([1.0] * 48, 48, replacement=False)
own = torch.utils.data.DataLoader(data, batch_size=2, sampler=weighted)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
optimizer = flockstep.distribute(model, optimizer, "all_reduce")
for epoch in range(3):
    for loader in (plain, own):
        seen = []
        for batch, (x,) in enumerate(flockstep.shard(loader)):
            seen += map(int, x.flatten().tolist())
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if (me, epoch, batch) == (1, 1, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
        name = "plain" if loader is plain else "own"
        (HERE / f"{name}-{epoch}-{me}").write_text(" ".join(map(str, seen)))
optimizer.finish()
"""


def test_the_data_are_dealt_anew_in_the_next_epoch(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SHARDED)
    ended = RealRun(["launch", "-n", "3", "--min-workers", "2", str(script)], tmp_path / "run", torch=True).end()
    assert ended.code == 0, ended.err

    def seen(name: str, epoch: int) -> dict[int, list[int]]:
        files = {int(file.name[-1]): file.read_text().split() for file in tmp_path.glob(f"{name}-{epoch}-*")}
        return {rank: list(map(int, samples)) for rank, samples in files.items()}

    for name in ("plain", "own"):
        assert {rank: len(samples) for rank, samples in seen(name, 0).items()} == {0: 16, 1: 16, 2: 16}
        assert sorted(chain(*seen(name, 0).values())) == list(range(48))
        last = seen(name, 2)
        assert sorted(last) == [0, 2]
        assert sorted(chain(*last.values())) == list(range(48))


JOINED = f"""
import sys, time
from pathlib import Path
import numpy as np
import torch
import flockstep

HERE = Path(__file__).parent
model = torch.nn.Linear(6, 2, bias=False)
torch.nn.init.constant_(model.weight, 0.25)
optimizer = torch.optim.SGD(model.parameters(), lr={RATE}, momentum={MOMENTUM})
optimizer = flockstep.distribute(model, optimizer, "all_reduce")
saved = flockstep.resumed() or {{"step": 0}}
step, me = saved["step"], flockstep.rank()
(HERE / f"begin-{{me}}").write_text(str(step))
while True:
    flockstep.checkpoint({{"step": step}})
    if (HERE / "go").exists():
        if step == int((HERE / "go").read_text()):
            break
    else:
        time.sleep(0.02)
    stream = np.random.default_rng((me, step))
    x, y = (torch.from_numpy(stream.standard_normal(shape).astype(np.float32)) for shape in ((5, 6), (5, 2)))
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()
    step += 1
    (HERE / f"at-{{me}}").write_text(str(step))
optimizer.finish()
momentum = optimizer.state[model.weight]["momentum_buffer"]
np.save(HERE / f"end-{{me}}.npy", np.stack([model.weight.detach().numpy(), momentum.numpy()]))
"""


@pytest.mark.parametrize("workers", [1, 2])  # one worker reads no flat gradient until another one joins it
def test_a_worker_joins_scripts_whose_processes_go_on(
    workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(JOINED)
    run = RealRun(
        ["launch", "-n", str(workers), "--max-workers", str(workers + 1), str(script)], tmp_path / "run", torch=True
    )
    run.wait_for_work(10)
    before = {name: pid for name, pid in run.nodes.items() if name.startswith("worker")}
    assert run_command(["join", str(tmp_path / "run")]) == 0
    assert f"the run continues with {workers + 1} workers from step " in capsys.readouterr().out
    run.wait_for_work(1)
    assert {name: run.nodes[name] for name in before} == before
    end_scheduled_script(tmp_path)
    ended = run.end()
    assert ended.code == 0, ended.err
    joined, last = int((tmp_path / f"begin-{workers}").read_text()), int((tmp_path / "go").read_text())
    assert (joined > 0, (tmp_path / "begin-0").read_text()) == (True, "0")
    ends = [np.load(tmp_path / f"end-{rank}.npy") for rank in range(workers + 1)]
    assert len({array.tobytes() for array in ends}) == 1
    members = [list(range(workers + (step >= joined))) for step in range(last)]
    assert np.allclose(ends[0], trained(members), rtol=0, atol=1e-5)
    record = RunFolder(tmp_path / "run")
    for rank, first in enumerate([0] * workers + [joined]):
        steps = [event.step for event in record.read_events() if isinstance(event, StepEvent) and event.rank == rank]
        assert steps == list(range(first + 1, last + 1))


def test_a_worker_that_joins_and_fails_before_its_first_step_ends_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    fails = "if saved['step']:\n    raise ValueError('no data here')\n"
    script.write_text(JOINED.replace("step, me = saved", fails + "step, me = saved"))
    run = RealRun(["launch", "-n", "2", "--max-workers", "3", str(script)], tmp_path / "run", torch=True)
    run.wait_for_work(10)
    run_command(["join", str(tmp_path / "run")])
    wait_until(lambda: RunFolder(run.record).read_config().workers == 2, PATIENCE, "the others go on")
    end_scheduled_script(tmp_path)
    ended = run.end()
    assert ended.code == 0, ended.err
    assert re.search("worker 2 failed before its first step: .*ValueError: no data here", ended.err)


def test_fewer_workers_than_the_least_end_the_run(tmp_path: Path) -> None:
    ended = run(tmp_path, RING, {1: 6}, (), "--min-workers", "4")
    assert ended.code != 0
    assert "worker 1 was killed by SIGKILL" in ended.err
