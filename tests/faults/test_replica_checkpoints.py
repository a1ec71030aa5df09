"""A launched script whose replicas are held by several processes goes on from its checkpoint."""

from __future__ import annotations

import re
import signal
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load

from flockstep import export_checkpoint
from flockstep.cli.app import run as run_command
from flockstep.errors import ConfigurationError
from flockstep.records import checkpoints as disk
from flockstep.records.events import StepEvent
from flockstep.records.folder import RunFolder
from flockstep_lab.chaos.base import Failpoint
from flockstep_lab.chaos.failpoint import signalled, write_failpoint
from support.hosts import PORT, network, on_all, require, require_idle
from support.hosts import Ended as EndedOnHost
from support.matrix import few
from support.processes import PATIENCE, Ended, RealRun, wait_until
from support.scripts import COMPILER

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes by their names in /proc")

STEPS = 24
SCRIPT = """
import sys, time
from pathlib import Path
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
import flockstep

HERE, KIND, STRATEGY, STEPS = Path(__file__).parent, sys.argv[1], sys.argv[2], int(sys.argv[3])
DROPPED = float(sys.argv[4])
replica = flockstep.replica()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(7, 10), nn.Dropout(DROPPED), nn.Tanh(), nn.Linear(10, 3), nn.LayerNorm(3))
torch.manual_seed(flockstep.rank())
if KIND == "sharded":  # of 3 rows, two processes hold 2 and 1
    for index in (0, 3, 4):
        fully_shard(model[index], mesh=replica.mesh())
elif KIND == "mesh" and replica.size == 4:
    mesh = replica.mesh(("dp", "tp"), (2, 2))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
elif KIND == "tensor" and replica.size > 1:
    parallelize_module(model, replica.mesh(("tensor",)), {"0": ColwiseParallel(), "3": RowwiseParallel()})
inner = torch.optim.AdamW(model.parameters(), 1e-2)
optimizer = flockstep.distribute(model, inner, STRATEGY)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
saved = flockstep.resumed() or {"step": 0}
(HERE / f"start-{flockstep.rank()}").write_text(str(saved["step"]))
if "scheduler" in saved:
    scheduler.load_state_dict(saved["scheduler"])
for step in range(saved["step"], STEPS):
    flockstep.checkpoint({"step": step, "scheduler": scheduler.state_dict()})
    if not (HERE / "go").exists() and (STEPS > 100 or not any(HERE.glob("run/checkpoints/*/manifest.json"))):
        time.sleep(0.02)  # until a test goes on, or there is a checkpoint, from which the run goes on when it is killed
    data = torch.Generator().manual_seed(100 * step + replica.index)
    x, y = torch.randn(12, 7, generator=data), torch.randn(12, 3, generator=data)
    if KIND == "sharded":
        x, y = x.chunk(replica.size)[replica.rank], y.chunk(replica.size)[replica.rank]
    if KIND == "mesh" and replica.size == 4:
        x, y = x.chunk(2)[replica.rank // 2], y.chunk(2)[replica.rank // 2]
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    scheduler.step()
optimizer.finish()
found = [*model.parameters(), *(one for state in inner.state.values() for one in state.values())]
found = [(one.full_tensor() if hasattr(one, "full_tensor") else one).detach() for one in found]
torch.save(found, HERE / f"end-{flockstep.rank()}")
"""


def begin(
    folder: Path, kind: str, strategy: str, *options: str, workers: int = 4, size: int = 2, dropped: float = 0.0
) -> Ended:
    run = started(folder, kind, strategy, *options, workers=workers, size=size, dropped=dropped)
    return run.end()


def started(
    folder: Path,
    kind: str,
    strategy: str,
    *options: str,
    workers: int,
    size: int,
    dropped: float = 0.0,
    steps: int = STEPS,
) -> RealRun:
    (folder / "script.py").write_text(COMPILER + SCRIPT)
    words = ["launch", "-n", str(workers), "--replica-size", str(size), *options, str(folder / "script.py")]
    return RealRun([*words, kind, strategy, str(steps), str(dropped)], folder / "run", torch=True)


def drops(kind: str) -> float:
    """Processes that compute one sample together would drop different units."""
    return 0.2 if kind == "sharded" else 0.0


def outcome(folder: Path) -> list[list[torch.Tensor]]:
    """Parameters and state of the optimizer on each worker at the end."""
    return [torch.load(folder / f"end-{rank}") for rank in range(4)]


@cache
def whole(folder: Path, kind: str, strategy: str) -> list[list[torch.Tensor]]:
    """The outcome of a run that was not stopped."""
    place = folder / f"{kind}-{strategy}"
    place.mkdir()
    ended = begin(place, kind, strategy, dropped=drops(kind))
    assert ended.code == 0, ended.err
    return outcome(place)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole")


@pytest.mark.parametrize(
    ("kind", "strategy", "who", "point", "number"),
    few(
        [
            ("sharded", "all_reduce", "worker-3", "gradient.computed", 17),
            ("sharded", "all_reduce", "launcher", "manifest.renamed", 2),
            ("tensor", "ps(bsp)", "worker-0", "gradient.computed", 17),
            ("tensor", "ps(bsp)", "launcher", "states.copied", 2),
            ("sharded", "local_sgd(4)", "worker-2", "shard.written", 2),
            ("tensor", "local_sgd(4)", "worker-1", "state.before_copy", 3),
            ("sharded", "streaming_diloco(4, fragments=2, overlap=1)", "worker-1", "gradient.computed", 17),
        ],
        ("sharded", "all_reduce", "worker-3", "gradient.computed", 17),
        ("tensor", "ps(bsp)", "launcher", "states.copied", 2),
    ),
)
def test_replicas_of_two_processes_that_are_killed_and_resumed_end_with_the_bits_of_those_that_were_not(
    tmp_path: Path, place: Path, kind: str, strategy: str, who: str, point: str, number: int
) -> None:
    kill = write_failpoint(tmp_path, Failpoint(who, point, number))
    ended = begin(tmp_path, kind, strategy, "--checkpoint-every", "5", "--import", kill, dropped=drops(kind))
    assert ended.code != 0
    assert signalled(tmp_path) is not None
    if who == "worker-3":
        assert "worker 3 was killed by SIGKILL" in ended.err, "and not that the others lost a connection to it"
    steps = disk.newest(tmp_path / "run").manifest.steps
    assert (steps[0], steps[2]) == (steps[1], steps[3]), "processes of a replica stop together"
    again = RealRun(["resume"], tmp_path / "run", torch=True).end()
    assert again.code == 0, again.err
    assert again.summary is not None
    assert again.summary["notes"][0].startswith(f"resumed from step {min(steps.values())}; ")
    for ours, theirs in zip(outcome(tmp_path), whole(place, kind, strategy), strict=True):
        assert len(ours) == len(theirs)
        assert all(map(torch.equal, ours, theirs))
    events = [one for one in RunFolder(tmp_path / "run").read_events() if isinstance(one, StepEvent)]
    for rank in range(4):
        assert [one.step for one in events if one.rank == rank] == list(range(1, STEPS + 1))


@pytest.mark.full
def test_replicas_on_two_hosts_that_are_killed_and_resumed_end_with_the_same_bits(tmp_path: Path, place: Path) -> None:
    (tmp_path / "script.py").write_text(COMPILER + SCRIPT)
    kill = write_failpoint(tmp_path, Failpoint("worker-3", "gradient.computed", 17))
    words = ["launch", "-n", "4", "--replica-size", "2", "--checkpoint-every", "5", "--import", kill]
    words += [str(tmp_path / "script.py"), "sharded", "all_reduce", str(STEPS), "0.2"]
    with network(2) as hosts:
        ended = on_all(hosts, *words, first=["--out", tmp_path / "run"], torch=True)
        assert all(one.code for one in ended)
        where = ["--nodes", "2", "--coordinator", f"{hosts[0].address}:{PORT}"]
        other = hosts[1].start(words[0], *where, "--node-rank", "1", *words[1:], torch=True)
        first = hosts[0].start("resume", tmp_path / "run", *where, "--node-rank", "0", torch=True)
        require([EndedOnHost.of(first), EndedOnHost.of(other)], 0, 0)
        require_idle(hosts)
    for ours, theirs in zip(outcome(tmp_path), whole(place, "sharded", "all_reduce"), strict=True):
        assert all(map(torch.equal, ours, theirs))


def reference(
    before: int, after: int, start: int, steps: int = STEPS
) -> tuple[dict[str, torch.Tensor], torch.optim.Optimizer]:
    """The parameters and the optimizer after all steps of all_reduce in one process, with another number of replicas
    from step `start` on.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 10), nn.Identity(), nn.Tanh(), nn.Linear(10, 3), nn.LayerNorm(3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    for step in range(steps):
        optimizer.zero_grad()
        replicas = before if step < start else after
        for index in range(replicas):
            data = torch.Generator().manual_seed(100 * step + index)
            x, y = torch.randn(12, 7, generator=data), torch.randn(12, 3, generator=data)
            (nn.functional.mse_loss(model(x), y) / replicas).backward()
        optimizer.step()
        scheduler.step()
    return {name: one.detach() for name, one in model.named_parameters()}, optimizer


def require_reference(folder: Path, workers: int, expected: dict[str, torch.Tensor]) -> None:
    for rank in range(workers):
        found = torch.load(folder / f"end-{rank}")[: len(expected)]
        for ours, theirs in zip(found, expected.values(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    few(
        [
            ("sharded", (4, 2), (6, 2)),
            ("sharded", (4, 2), (2, 1)),
            ("sharded", (6, 3), (4, 2)),
            ("sharded", (2, 1), (6, 3)),
            ("sharded", (4, 2), (3, 3)),
            ("tensor", (2, 1), (4, 2)),
            ("tensor", (4, 2), (1, 1)),
            ("mesh", (4, 4), (2, 1)),
            ("mesh", (1, 1), (4, 4)),
        ],
        ("sharded", (4, 2), (6, 2)),
        ("tensor", (2, 1), (4, 2)),
    ),
)
def test_replicas_go_on_in_another_number_and_on_other_numbers_of_processes(
    tmp_path: Path, kind: str, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """The numbers are of workers, and of processes of a replica. Parameters, moments of AdamW and schedule go on."""
    kill = write_failpoint(tmp_path, Failpoint("worker-0", "gradient.computed", 17))
    options = ["--checkpoint-every", "5", "--import", kill]
    assert begin(tmp_path, kind, "all_reduce", *options, workers=before[0], size=before[1]).code != 0
    words = ["resume", "-n", str(after[0]), "--replica-size", str(after[1])]
    again = RealRun(words, tmp_path / "run", torch=True).end()
    assert again.code == 0, again.err
    start = int((tmp_path / "start-0").read_text())
    assert 5 <= start < 17
    require_reference(tmp_path, after[0], reference(before[0] // before[1], after[0] // after[1], start)[0])
    config = RunFolder(tmp_path / "run").read_config()
    assert (config.workers, config.processes_of_replica) == after


def test_new_replicas_take_the_state_of_optimizers_that_go_on_locally(tmp_path: Path) -> None:
    """Shards of a new replica are those of the same part of others."""
    kill = write_failpoint(tmp_path, Failpoint("worker-0", "gradient.computed", 17))
    options = ["--checkpoint-every", "5", "--import", kill]
    assert begin(tmp_path, "sharded", "local_sgd(period=5)", *options, workers=2, size=2).code != 0
    again = RealRun(["resume", "-n", "4"], tmp_path / "run", torch=True).end()
    assert again.code == 0, again.err
    first, *others = (torch.load(tmp_path / f"end-{rank}")[:6] for rank in range(4))
    for other in others:
        assert len(other) == len(first) > 0
        assert all(map(torch.equal, first, other)), "all replicas end equal"


def test_a_run_goes_on_without_the_replica_of_a_process_that_dies(tmp_path: Path) -> None:
    """Other processes of the replica end with it, and the rest go back to the checkpoint, as with fewer replicas."""
    kill = write_failpoint(tmp_path, Failpoint("worker-3", "gradient.computed", 17))
    options = ["--checkpoint-every", "5", "--min-workers", "3", "--import", kill]
    ended = begin(tmp_path, "sharded", "all_reduce", *options, workers=6)
    assert ended.code == 0, ended.err
    assert ended.summary is not None
    assert "; it held part 1 of replica 1, and worker 2 ended with worker 3, " in ended.summary["notes"][0]
    assert RunFolder(tmp_path / "run").read_config().workers == 4
    require_reference(tmp_path, 4, reference(3, 2, int((tmp_path / "start-0").read_text()))[0])


@pytest.mark.full
def test_replicas_join_and_leave_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--checkpoint-every", "1000", "--min-workers", "2", "--max-workers", "6"]
    run = started(tmp_path, "sharded", "all_reduce", *options, workers=4, size=2, steps=1500)
    run.wait_for_work(10)
    record = RunFolder(tmp_path / "run")
    assert run_command(["join", str(record.path)]) == 2
    assert "2 workers hold a replica together, so that they join together, got 1" in capsys.readouterr().err
    assert run_command(["join", str(record.path), "-n", "2"]) == 0
    wait_until(lambda: record.read_config().workers == 6, PATIENCE, "the others have joined")
    run.wait_for_work(3)
    run.fault(signal.SIGTERM, "worker-1")
    wait_until(lambda: record.read_config().workers == 4, PATIENCE, "the replica of worker 1 has left")
    (tmp_path / "go").touch()
    ended = run.end()
    assert ended.code == 0, ended.err
    assert ended.summary is not None
    told = [note.partition(";")[0] for note in ended.summary["notes"]]
    assert "2 workers joined" in told
    assert "worker 0 and worker 1 left after SIGTERM" in told


@pytest.mark.full
def test_checkpoints_after_the_loss_of_a_replica_hold_the_others_which_are_resumed(tmp_path: Path) -> None:
    run = started(tmp_path, "sharded", "gossip", "--checkpoint-every", "5", workers=6, size=2, steps=1500)
    run.wait_for_work(10)
    run.fault(signal.SIGKILL, "worker-3")
    files = tmp_path / "run" / "checkpoints"

    def held() -> bool:
        manifests = [disk.read_manifest(file.parent) for file in files.glob("*/manifest.json")]
        return any(one.lost.keys() == {2, 3} and one.steps.keys() == {0, 1, 4, 5} for one in manifests)

    wait_until(held, PATIENCE, "a checkpoint without the replica")
    run.fault(signal.SIGKILL, "main")
    run.end()
    (tmp_path / "go").touch()
    again = RealRun(["resume"], tmp_path / "run", torch=True).end()
    assert again.code == 0, again.err
    assert RunFolder(tmp_path / "run").read_config().workers == 4
    events = [one for one in RunFolder(tmp_path / "run").read_events() if isinstance(one, StepEvent)]
    last = [max(one.step for one in events if one.rank == rank) for rank in range(4)]
    assert (last[0], last[2]) == (last[1], last[3]), "also if the lost workers had taken different numbers of steps"


def test_too_few_workers_are_counted_by_whole_replicas(tmp_path: Path) -> None:
    kill = write_failpoint(tmp_path, Failpoint("worker-3", "gradient.computed", 17))
    options = ["--checkpoint-every", "5", "--min-workers", "3", "--import", kill]
    ended = begin(tmp_path, "sharded", "all_reduce", *options)
    assert ended.code != 0
    assert "continues from step" in ended.err
    assert RunFolder(tmp_path / "run").read_config().workers == 4


@pytest.mark.parametrize("kind", few(["sharded", "tensor"], "tensor"))
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_distributed_checkpoint_reads_an_exported_replica(tmp_path: Path, kind: str) -> None:
    kill = write_failpoint(tmp_path, Failpoint("launcher", "checkpoint.complete", 2))
    assert begin(tmp_path, kind, "all_reduce", "--checkpoint-every", "5", "--import", kill).code != 0
    export_checkpoint(tmp_path / "run", tmp_path / "exported", replica=1)
    steps = disk.newest(tmp_path / "run").manifest.steps[2]
    expected, optimizer = reference(2, 2, steps, steps=steps)
    model = nn.Sequential(nn.Linear(7, 10), nn.Identity(), nn.Tanh(), nn.Linear(10, 3), nn.LayerNorm(3))
    moments = {name: {"exp_avg": torch.zeros_like(one), "step": torch.zeros(())} for name, one in expected.items()}
    state = {"model": model.state_dict(), "optimizer": {"state": moments}}
    load(state, checkpoint_id=tmp_path / "exported", no_dist=True)
    for (name, value), theirs in zip(expected.items(), optimizer.state.values(), strict=True):
        torch.testing.assert_close(model.state_dict()[name], value, atol=1e-5, rtol=0)
        torch.testing.assert_close(moments[name]["exp_avg"], theirs["exp_avg"], atol=1e-5, rtol=0)
        assert moments[name]["step"] == steps
    with pytest.raises(ConfigurationError, match="exported exists; choose another folder"):
        export_checkpoint(tmp_path / "run", tmp_path / "exported")
    with pytest.raises(ConfigurationError, match=r"replica must be one of 0, 1, which .* holds, got 2"):
        export_checkpoint(tmp_path / "run", tmp_path / "other", replica=2)


@pytest.mark.parametrize(
    ("strategy", "why"),
    few(
        [
            ("ps(bsp)", "its servers hold the parameters in the parts of 2 processes"),
            ("streaming_diloco(4, fragments=2, overlap=1)", r"its workers keep an array of shape \(\d+,\)"),
        ],
        ("ps(bsp)", "its servers hold the parameters in the parts of 2 processes"),
    ),
)
def test_strategies_whose_state_stays_with_its_processes_are_told(tmp_path: Path, strategy: str, why: str) -> None:
    kill = write_failpoint(tmp_path, Failpoint("launcher", "checkpoint.complete", 1))
    assert begin(tmp_path, "sharded", strategy, "--checkpoint-every", "3", "--import", kill).code != 0
    before = sorted((tmp_path / "run" / "checkpoints").iterdir())
    again = RealRun(["resume", "--replica-size", "1", "-n", "2"], tmp_path / "run", torch=True).end()
    assert again.code == 2
    assert re.fullmatch(
        rf"flockstep: a script with .* because {why}.*, got 1; resume with --replica-size 2\n", again.err
    )
    assert sorted((tmp_path / "run" / "checkpoints").iterdir()) == before


@pytest.mark.parametrize("strategy", few(["gossip", "easgd", "ps(ssp(3))"], "gossip"))
def test_checkpoints_that_follow_each_other_stop_no_replica_in_the_middle_of_a_step(
    tmp_path: Path, strategy: str
) -> None:
    """Replicas stop at different steps, but the processes of one at the same step, for which they wait together."""
    ended = begin(tmp_path, "sharded", strategy, "--checkpoint-every", "1")
    assert ended.code == 0, ended.err
    steps = disk.newest(tmp_path / "run").manifest.steps
    assert (steps[0], steps[2]) == (steps[1], steps[3])
