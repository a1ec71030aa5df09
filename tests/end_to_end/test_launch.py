"""Users' own scripts under `flockstep launch`: what they may do, what they do wrong, and what happens to them."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flockstep
from flockstep.errors import ConfigurationError
from flockstep.launchers.supervisor import GRACE
from flockstep.records.folder import RunFolder
from support.matrix import few
from support.processes import PATIENCE, Ended, RealRun, alive, wait_until
from support.scripts import NUMPY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")


TORCH = """
import sys
from pathlib import Path
import torch
from torch import nn
import flockstep
from flockstep.runtime.node_spec import spec_from_environment

HERE = Path(__file__).parent
rank = spec_from_environment().address
"""
FOREVER = 10**9


def launched(
    body: str,
    folder: Path,
    workers: int = 2,
    before: str = NUMPY,
    seed: int = 0,
    transport: str = "ipc",
    afresh: bool = False,
) -> RealRun:
    """Most scripts do with numpy what `flockstep.distribute` does with PyTorch: they start ten times as fast."""
    script = folder / "script.py"
    script.write_text(before + body)
    words = ["launch", "-n", str(workers), "--transport", transport, "--seed", str(seed), str(script)]
    return RealRun(words, folder / "run", torch=before == TORCH, afresh=afresh)


@pytest.mark.full
def test_the_seed_decides_which_peers_gossip_draws(tmp_path: Path) -> None:
    """The same at every launch with one seed: nodes draw from streams of (seed, rank), not of their own."""
    body = """
start("gossip(0.5)")
worker, sent, send = optimizer._worker, [], optimizer._worker.send
worker.send = lambda to, *message, **named: (sent.append(to), send(to, *message, **named))
steps(40)
optimizer.finish()
(HERE / f"peers-{rank}").write_text(str(sent))
"""
    drawn = []
    for number, seed in enumerate((1, 1, 2)):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert launched(body, folder, 4, seed=seed).end().code == 0
        drawn.append([(folder / f"peers-{rank}").read_text() for rank in range(4)])
    assert drawn[0] == drawn[1]
    assert all(one != other for one, other in zip(drawn[0], drawn[2], strict=True))
    assert len(set(drawn[0])) == 4


def test_gossip_ends_where_its_collector_is_killed_while_it_tells_the_others(tmp_path: Path) -> None:
    """Worker 1 has been told and has ended when worker 0 dies; the others learn from it that it sends no more."""
    body = """
start("gossip(0.5)")
steps(20)
worker, send, close = optimizer._worker, optimizer._worker.send, optimizer._session.connection.close
def dying(to, tag, *rest, **named):
    send(to, tag, *rest, **named)
    if tag == "senders":
        until("ended")
        os.kill(os.getpid(), 9)
def ending():
    close()
    (HERE / "ended").touch()
if rank == 0:
    worker.send = dying
elif rank == 1:
    optimizer._session.connection.close = ending
optimizer.finish()
"""
    ended = outcome(body, tmp_path, 4)
    assert (ended.code, ended.summary is not None and ended.summary["status"]) == (0, "finished"), ended.err
    assert ended.summary is not None
    assert [lost["node"] for lost in ended.summary["lost"]] == [0]
    assert [worker["steps"] for worker in ended.summary["per_worker"]][1:] == [20] * 3


def outcome(body: str, folder: Path, workers: int = 2, before: str = NUMPY) -> Ended:
    return launched(body, folder, workers, before).end()


def failed(ended: Ended, pattern: str, code: int = 1) -> None:
    """One sentence on standard error, no traceback, and a record that says the same, unless no step was taken."""
    assert re.fullmatch(f"flockstep: {pattern}\n", ended.err), ended.err
    assert ended.code == code
    if ended.summary is None:
        return
    assert ended.summary["status"] == "failed"
    assert ended.err.endswith(f"flockstep: {ended.summary['error']}\n")


@pytest.mark.full
def test_all_models_are_equal_after_the_end(tmp_path: Path) -> None:
    body = """
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2), nn.Linear(2, 2).requires_grad_(False))
optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9), "all_reduce")
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
frozen = model[3].weight.clone()
rates = []
for _ in range(12):
    x = torch.randn(8, 4)
    model.zero_grad(set_to_none=True)
    (model(x) - x[:, :2]).square().mean().backward()
    optimizer.step()
    schedule.step()
    rates.append(optimizer.param_groups[0]["lr"])
optimizer.finish()
assert rates == [0.4] * 4 + [0.2] * 5 + [0.1] * 3, rates
assert torch.equal(frozen, model[3].weight)
torch.save([p.detach() for p in model.parameters() if p.requires_grad], HERE / f"model-{rank}")
"""
    ended = outcome(body, tmp_path, 2, TORCH)
    assert (ended.code, ended.out) == (0, "")
    models = [torch.load(tmp_path / f"model-{rank}") for rank in range(2)]
    for other in models[1:]:
        assert all(torch.equal(a, b) for a, b in zip(models[0], other, strict=True))
    result = torch.from_numpy(RunFolder(tmp_path / "run").read_result()[0])
    assert torch.equal(result, torch.cat([p.flatten() for p in models[0]]))
    assert ended.summary is not None
    assert ended.summary["replicas_agree"] is True
    assert ended.summary["strategy"] == "all_reduce"
    assert [worker["steps"] for worker in ended.summary["per_worker"]] == [12] * 2


@pytest.mark.parametrize("strategy", few(["all_reduce", "bsp", "gossip"], "bsp"))
def test_a_script_need_not_call_finish(strategy: str, tmp_path: Path) -> None:
    ended = outcome(f"start({strategy!r}); steps(20)", tmp_path)
    assert ended.code == 0
    assert ended.summary is not None
    assert ended.summary["status"] == "finished"
    assert [worker["steps"] for worker in ended.summary["per_worker"]] == [20, 20]


@pytest.mark.parametrize("strategy", few(["all_reduce", "bsp"], "all_reduce"))
def test_a_killed_worker(strategy: str, tmp_path: Path) -> None:
    run = launched(f"start({strategy!r}); steps({FOREVER})", tmp_path)
    run.wait_for_work()
    run.fault(signal.SIGKILL, "worker-1")
    ended = run.end()
    assert ended.seconds < ended.limit
    failed(ended, r"worker 1 was killed by SIGKILL at about step \d+; (worker 0|server 0) at step \d+ .*")
    assert ended.summary is not None
    assert [lost["node"] for lost in ended.summary["lost"]] == [1]


def test_a_killed_worker_that_was_done_is_done_without_where_that_is_possible(tmp_path: Path) -> None:
    body = """
start("asgd")
steps(20 + 20 * (1 - rank))
if rank == 0:
    until("killed")
    steps(20)
"""
    run = launched(body, tmp_path)
    wait_until(lambda: b'"type":"node"' in run.events("worker-1"), PATIENCE, "worker 1 is done")
    run.nodes = run.working()
    run.fault(signal.SIGKILL, "worker-1")
    wait_until(lambda: b'"type":"lost"' in run.events("server-0"), PATIENCE, "the server hears of it")
    (tmp_path / "killed").touch()
    ended = run.end()
    assert ended.code == 0
    assert ended.summary is not None
    assert ended.summary["status"] == "finished"
    assert [worker["steps"] for worker in ended.summary["per_worker"]] == [60, 20]


@pytest.mark.parametrize("strategy", few(["all_reduce", "bsp", "local_sgd(period=4)", "dpsgd"], "all_reduce"))
def test_a_worker_that_leaves_early_ends_a_run_in_which_all_go_in_step(strategy: str, tmp_path: Path) -> None:
    ended = outcome(f"start({strategy!r}); steps(10 if rank else 50)", tmp_path)
    waited = r"worker 0 at step 1[12] waited for .*"
    early = r"the script of worker 1 ended after step 10 without optimizer\.finish\(\)"
    left = "worker 1 has left while worker 0 waited for .* at step 1[12]"
    failed(ended, rf"({early}; {waited}|({early}, and worker 0 went on\nflockstep: )?{left})")


@pytest.mark.parametrize("strategy", ["all_reduce", "gossip"])
def test_a_script_that_ends_with_an_error_of_its_own_is_the_reason(strategy: str, tmp_path: Path) -> None:
    body = f"start({strategy!r}); steps(5)\nif rank: sys.exit('bad data')\nsteps(20); optimizer.finish()"
    ended = outcome(body, tmp_path)
    assert ended.code == 1
    lines, said = ended.err.splitlines(), "worker 1 exited with code 1 after step 5, before optimizer.finish()"
    assert [lines[0], lines[-1]] == ["bad data", f"flockstep: {said}"]
    assert ended.summary is not None
    assert (ended.summary["status"], ended.summary["error"]) == ("failed", said)


def test_a_script_that_ends_early_and_quietly_is_told_of_and_lost(tmp_path: Path) -> None:
    """The parameters of worker 1 stay near 0.4 and those of worker 0 near 0: the result holds no half of the former."""
    ended = outcome("start('gossip'); steps(5)\nif rank: sys.exit()\nsteps(200); optimizer.finish()", tmp_path)
    assert ended.code == 0
    said = "the script of worker 1 ended after step 5 without optimizer.finish(), and worker 0 went on"
    assert ended.err.count(said) == 1
    assert ended.summary is not None
    assert [(lost["node"], lost["reason"]) for lost in ended.summary["lost"]] == [(1, said)]
    assert ended.summary["notes"] == [said]
    assert np.abs(RunFolder(tmp_path / "run").read_result()[0]).max() < 0.01


@pytest.mark.parametrize("strategy", few(["asgd", "ps(consistency=ssp(3))", "easgd", "gossip", "broadcast"], "asgd"))
def test_a_worker_may_leave_early_where_the_others_can_do_without_it(strategy: str, tmp_path: Path) -> None:
    ended = outcome(f"start({strategy!r}); steps(10 if rank else 50)", tmp_path)
    assert ended.code == 0
    assert ended.summary is not None
    assert ended.summary["lost"] == []
    assert [worker["steps"] for worker in ended.summary["per_worker"]] == [50, 10]


def test_a_script_that_raises_is_named(tmp_path: Path) -> None:
    ended = outcome(f"start(); steps(5)\nif rank: raise ValueError('boom')\nsteps({FOREVER})", tmp_path)
    assert ended.code == 1
    assert "Traceback (most recent call last)" in ended.err, "it is the user's own script: that one is shown as ever"
    assert ended.err.count("Traceback") == 1
    lines = ended.err.splitlines()
    assert lines[-2] == "ValueError: boom"
    said = r"worker 1 at step 5 raised ValueError: boom \(script.py, line \d+\)"
    assert re.fullmatch(rf"flockstep: {said}; --debug shows the traceback", lines[-1]), lines[-1]
    assert ended.summary is not None
    assert ended.summary["status"] == "failed"


@pytest.mark.full
def test_a_script_that_catches_the_runs_error_gets_it_again(tmp_path: Path) -> None:
    body = """
start(); steps(5)
if rank: os._exit(7)
for attempt in range(3):
    try:
        steps(2)
    except Exception as error:
        (HERE / f"caught-{attempt}").write_text(f"{type(error).__name__}: {error}")
"""
    failed(outcome(body, tmp_path), "worker 1 exited with code 7( at about step 5)?; worker 0 at step 6 waited for .*")
    caught = {path.read_text() for path in tmp_path.glob("caught-*")}
    assert len(list(tmp_path.glob("caught-*"))) == 3
    assert len(caught) == 1
    assert caught.pop().startswith("PeerLost: worker 1 exited with code 7")


@pytest.mark.parametrize("who", few(["True", "rank"], "rank"))
def test_a_script_that_never_calls_distribute(who: str, tmp_path: Path) -> None:
    ended = outcome(f"if {who}: sys.exit()\nstart(); steps(5)", tmp_path)
    failed(ended, r"worker [01] exited with code 0 without joining the run .*before the run started")


def test_a_job_file_that_is_launched_as_a_script_is_told_of_train(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def job():\n    return None\n")
    ended = RealRun(["launch", "-n", "2", str(tmp_path / "mine.py")], tmp_path / "run").end()
    assert ended.code == 1
    assert f"this file has job(): to train the job, write flockstep train {tmp_path / 'mine.py'}" in ended.err


@pytest.mark.full
def test_workers_that_ask_for_different_strategies(tmp_path: Path) -> None:
    ended = outcome("start('gossip' if rank else 'all_reduce'); steps(5)", tmp_path)
    pattern = r"every worker must use the same strategy, got \w+ from worker \d and \w+ from another worker"
    failed(ended, pattern, code=2)


@pytest.mark.full
def test_workers_with_different_models(tmp_path: Path) -> None:
    pattern = r"the model of worker \d differs: .*; build the same model on every worker"
    failed(outcome("start(shapes={'w': (3 if rank else 2,)})", tmp_path), pattern, code=2)


@pytest.mark.parametrize(
    ("strategy", "body", "warned"),
    few(
        [
            ("local_sgd", "steps(2)", 1),
            ("local_sgd(period=2)", "steps(2)", 0),
            ("local_sgd(period=2)", "steps(3)", 1),
            ("local_sgd", "steps(2); optimizer.finish()", 0),
            ("all_reduce", "steps(2)", 0),
            ("ps(bsp)", "steps(2)", 0),
        ],
        ("local_sgd(period=2)", "steps(2)", 0),
        ("local_sgd(period=2)", "steps(3)", 1),
        ("local_sgd", "steps(2); optimizer.finish()", 0),
        ("all_reduce", "steps(2)", 0),
    ),
)
def test_a_script_that_does_not_take_the_result_is_warned_once(
    strategy: str, body: str, warned: int, tmp_path: Path
) -> None:
    ended = outcome(f"start({strategy!r}); {body}", tmp_path)
    assert ended.code == 0, ended.err
    assert (
        ended.err.count("the script ended without optimizer.finish(), so the models of its workers are not") == warned
    )


@pytest.mark.full
def test_a_step_after_the_end_is_refused(tmp_path: Path) -> None:
    ended = outcome("start(); steps(2); optimizer.finish(); optimizer.finish()\nif rank: steps(1)", tmp_path)
    assert ended.code == 1
    assert ended.err.endswith("flockstep: worker 1 exited with code 1 after the run had ended\n")
    assert "the run has been finished; call finish() after the last step()" in ended.err
    assert ended.summary is not None
    assert [worker["steps"] for worker in ended.summary["per_worker"]] == [2, 2]


def test_a_script_that_fails_after_the_end_is_not_a_success(tmp_path: Path) -> None:
    ended = outcome("start(); steps(2); optimizer.finish(); sys.exit(rank * 3)", tmp_path)
    failed(ended, "worker 1 exited with code 3 after the run had ended")
    assert RunFolder(tmp_path / "run").read_result()[0].shape == (20,)


def test_a_script_may_go_on_after_the_end_for_as_long_as_it_likes(tmp_path: Path) -> None:
    told = "(HERE / f'over-{os.getpid()}').touch()"
    run = launched(f"start(); steps(2); optimizer.finish(); {told}; until('go')", tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("over-*"))) == 2, PATIENCE, "the run is over")
    over = time.monotonic()
    wait_until(lambda: time.monotonic() > over + GRACE + 0.5, PATIENCE, "longer than processes of ours get")
    assert all(alive(int(file.name.partition("-")[2])) for file in tmp_path.glob("over-*"))
    (tmp_path / "go").touch()
    assert run.end().code == 0


def test_what_a_script_starts_does_not_belong_to_the_run(tmp_path: Path) -> None:
    body = """
start(); steps(2)
if rank:
    program = "from flockstep.runtime.node_spec import spec_from_environment; print(spec_from_environment())"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    (HERE / "said").write_text(said.stdout + said.stderr)
steps(2)
"""
    ended = outcome(body, tmp_path)
    assert ended.code == 0
    assert (tmp_path / "said").read_text() == "None\n"


@pytest.mark.parametrize("joined", few([True, False], False))
@pytest.mark.parametrize("kind", few([signal.SIGKILL, signal.SIGINT], signal.SIGKILL))
@pytest.mark.parametrize("transport", few(["ipc", "shared_memory"], "ipc"))
def test_nothing_outlives_the_launcher(joined: bool, kind: signal.Signals, transport: str, tmp_path: Path) -> None:
    last = f"start(); steps({FOREVER})" if joined else "until('never')"
    run = launched(f"(HERE / f'here-{{rank}}').touch(); {last}", tmp_path, transport=transport, afresh=True)
    wait_until(lambda: len(list(tmp_path.glob("here-*"))) == 2, PATIENCE, "both scripts run")
    if joined:
        run.wait_for_work()
    assert len(run.children()) == 2
    run.fault(kind, "main" if kind == signal.SIGKILL else "group")
    wait_until(lambda: not run.processes(), PATIENCE, "all processes gone")
    if kind == signal.SIGINT:
        ended = run.end()
        kept = "everything computed so far is in the record" if joined else "no worker had begun to train"
        assert (ended.code, ended.err) == (130, f"flockstep: interrupted; {kept}\n")
        assert ended.summary is not None
        assert ended.summary["status"] == "interrupted"


def train(strategy: str | None, **options: Any) -> list[torch.Tensor]:
    """The parameters after a few steps of the same training, by plain PyTorch or by a single worker."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    plain = torch.optim.SGD(model.parameters(), lr=0.3, **options)
    optimizer: Any = plain if strategy is None else flockstep.distribute(model, plain, strategy)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    for _ in range(30):
        x = torch.randn(8, 4)
        optimizer.zero_grad()
        (model(x) - x[:, :2]).square().mean().backward()
        optimizer.step()
        schedule.step()
    if strategy is not None:
        optimizer.finish()
    return [p.detach().clone() for p in model.parameters()]


OPTIONS = [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("strategy", ["all_reduce", "local_sgd", "gossip", "broadcast", "dpsgd"])
def test_a_single_worker_that_steps_itself_is_plain_pytorch_bit_for_bit(strategy: str, options: dict[str, Any]) -> None:
    assert all(map(torch.equal, train(strategy, **options), train(None, **options)))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("strategy", ["bsp", "asgd", "ps(consistency=ssp(3), shards=2)"])
def test_a_single_worker_with_servers_is_plain_pytorch_up_to_rounding(strategy: str, options: dict[str, Any]) -> None:
    for ours, plain in zip(train(strategy, **options), train(None, **options), strict=True):
        torch.testing.assert_close(ours, plain)


def test_a_single_worker_that_has_finished_is_finished() -> None:
    model = nn.Linear(2, 2)
    optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "all_reduce")
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.finish()
    optimizer.finish()
    with pytest.raises(ConfigurationError, match="the run has been finished"):
        optimizer.step()
