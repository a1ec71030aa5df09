"""A run that is killed anywhere and resumed ends as the run that was not killed."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from flockstep import registry
from flockstep.cli.app import run as run_command
from flockstep.launchers.simulate import simulate
from flockstep.records import checkpoints as disk
from flockstep.records.config import RunConfig
from flockstep.records.events import EvaluationEvent, StepEvent, UpdateEvent
from flockstep.records.folder import RunFolder
from flockstep.strategies.base import Strategy
from flockstep_lab.chaos.base import Failpoint
from flockstep_lab.chaos.failpoint import signalled, write_failpoint
from support.disks import fill, small_disk
from support.jobs import go_on, paced
from support.matrix import few
from support.processes import PATIENCE, Ended, RealRun, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes by their names in /proc")

STEPS = 120
KILLS = [
    *(
        ("all_reduce", "worker-1", point, number)
        for point, number in [("gradient.computed", 70), ("state.before_copy", 2), ("shard.written", 2)]
    ),
    ("all_reduce", "worker-0", "shard.renamed", 2),
    *(
        ("all_reduce", "launcher", point, 2)
        for point in ("checkpoint.begun", "states.copied", "manifest.begun", "manifest.renamed", "checkpoint.complete")
    ),
    ("ps(bsp)", "worker-1", "gradient.computed", 70),
    ("ps(bsp, shards=2, replicas=1)", "worker-1", "shard.written", 2),
    ("local_sgd(8)", "worker-1", "shard.written", 2),
    ("ps(bsp, shards=2, codec=topk(0.2), feedback=residual)", "launcher", "manifest.renamed", 2),
    ("streaming_diloco(period=8, overlap=4)", "worker-0", "gradient.computed", 70),
]


def begin(folder: Path, strategy: str, *more: str) -> RealRun:
    words = ["train", paced(folder), "-s", strategy, "-n", "2", "--steps", str(STEPS), "--evaluate-every", "30"]
    return RealRun([*words, "--checkpoint-every", "20", *more], folder / "run")


def resumed(folder: Path) -> Ended:
    """Resume the run by a relative path, as users do."""
    go_on(folder)
    with contextlib.chdir(folder):
        return RealRun(["resume"], Path("run")).end()


def uninterrupted(folder: Path, strategy: str, faults: tuple[str, ...] = ()) -> RunFolder:
    """The same job in virtual time, which was never stopped."""
    config = RunConfig(
        kind="simulate",
        job=paced(folder),
        strategy=strategy,
        workers=2,
        steps=STEPS,
        evaluate_every=30,
        threads=1,
        faults=faults,
    )
    go_on(folder)
    simulate(config, folder / "virtual", lambda done, every, t: None, False)
    return RunFolder(folder / "virtual")


@pytest.mark.parametrize(
    ("strategy", "who", "point", "number"),
    few(KILLS, ("all_reduce", "launcher", "manifest.begun", 2), ("ps(bsp)", "worker-1", "gradient.computed", 70)),
)
def test_a_run_killed_at_a_point_and_resumed_ends_with_the_bits_of_one_that_was_not(
    strategy: str, who: str, point: str, number: int, tmp_path: Path
) -> None:
    run = begin(tmp_path, strategy, "--import", write_failpoint(tmp_path, Failpoint(who, point, number)))
    ended = run.end()
    assert ended.code != 0
    assert signalled(tmp_path) is not None
    again = resumed(tmp_path)
    assert again.code == 0, again.err
    assert again.summary is not None
    assert again.summary["notes"][0].startswith("resumed from step ")
    whole, ours = uninterrupted(tmp_path, strategy), RunFolder(tmp_path / "run")
    assert ours.read_result()[0].tobytes() == whole.read_result()[0].tobytes()
    check_record(ours, whole)


def test_events_lost_from_before_a_checkpoint_are_told(tmp_path: Path) -> None:
    """A power cut may take what was not synchronized with the disk: here, the events of a worker."""
    kill = write_failpoint(tmp_path, Failpoint("launcher", "checkpoint.complete", 2))
    assert begin(tmp_path, "all_reduce", "--import", kill).end().code != 0
    (tmp_path / "run" / "events" / "worker-0.jsonl").unlink()
    steps = disk.newest(tmp_path / "run").manifest.steps[0]
    again = resumed(tmp_path)
    sentence = f"the record lacks the events of {steps} steps of worker 0, which were lost before the run was resumed;"
    assert again.code == 0, again.err
    assert again.err.count(f"flockstep: {sentence}") == 1
    assert again.summary is not None
    assert again.summary["notes"][1].startswith(sentence)
    assert again.summary["completeness"] is None
    assert run_command(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]) == 0
    assert sentence in (tmp_path / "page.html").read_text()
    whole, ours = uninterrupted(tmp_path, "all_reduce"), RunFolder(tmp_path / "run")
    assert ours.read_result()[0].tobytes() == whole.read_result()[0].tobytes()


def test_an_attacker_remembers_its_gradients_when_the_run_goes_on(tmp_path: Path) -> None:
    fault = "little_is_enough(1, 1.5)"
    kill = write_failpoint(tmp_path, Failpoint("launcher", "manifest.begun", 2))
    assert begin(tmp_path, "all_reduce", "--fault", fault, "--import", kill).end().code != 0
    again = resumed(tmp_path)
    assert again.code == 0, again.err
    whole = uninterrupted(tmp_path, "all_reduce", (fault,))
    assert RunFolder(tmp_path / "run").read_result()[0].tobytes() == whole.read_result()[0].tobytes()


def check_record(ours: RunFolder, whole: RunFolder) -> None:
    """Every step of every worker is in the record once, in order, and so is every evaluation with its value."""
    for rank in range(2):
        steps = [(e.step, e.loss) for e in ours.read_events() if isinstance(e, StepEvent) and e.rank == rank]
        assert steps == [(e.step, e.loss) for e in whole.read_events() if isinstance(e, StepEvent) and e.rank == rank]
    times = [event.seconds for event in ours.read_events() if isinstance(event, StepEvent) and event.rank == 0]
    assert all(one < other for one, other in itertools.pairwise(times))
    evaluations, those = ([e for e in one.read_events() if isinstance(e, EvaluationEvent)] for one in (ours, whole))
    assert [(e.step, e.loss) for e in evaluations] == [(e.step, e.loss) for e in those]


@pytest.mark.parametrize("strategy", few(["asgd", "easgd(period=4)", "gossip(0.5)", "adpsgd"], "asgd"))
def test_an_asynchronous_run_goes_on_from_its_checkpoint(strategy: str, tmp_path: Path) -> None:
    """SIGTERM takes a checkpoint; nothing that was computed before it is lost."""
    run = begin(tmp_path, strategy)
    run.wait_for_work(30)
    run.fault(signal.SIGTERM, "main")
    ended = run.end()
    assert ended.code == 130
    checkpoint = disk.newest(tmp_path / "run")
    least = min(checkpoint.manifest.steps.values())
    assert f"; flockstep resume {(tmp_path / 'run').resolve()} continues from step {least}\n" in ended.err
    before = RunFolder(tmp_path / "run").read_events()
    made = [event for event in before if isinstance(event, StepEvent)]
    assert len(made) == sum(checkpoint.manifest.steps.values()), "every step is in the checkpoint"
    again = resumed(tmp_path)
    assert again.code == 0, again.err
    assert again.summary is not None
    assert again.summary["notes"] == [f"resumed from step {least}; 0 recorded steps were repeated"]
    after = RunFolder(tmp_path / "run").read_events()
    assert [event for event in after if event in made] == made
    summary = RunFolder(tmp_path / "run").read_summary()
    assert summary.steps == 2 * STEPS
    if strategy == "asgd":
        applied = [event for event in after if isinstance(event, UpdateEvent) and event.node < 0]
        assert Counter(event.source for event in applied) == {0: STEPS, 1: STEPS}, "each gradient is applied once"
    assert summary.best_metric is not None
    assert summary.best_metric > 0.8


def test_a_full_disk_keeps_the_checkpoint_before_and_ends_the_run(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "1m") as place:
        record = place / "run"
        words = ["train", paced(tmp_path), "-s", "all_reduce", "-n", "2", "--steps", "150", "--checkpoint-every", "20"]
        run = RealRun(words, record)
        wait_until(lambda: (record / "checkpoints/000001/manifest.json").exists(), PATIENCE, "a checkpoint")
        fill(place / "filler")
        ended = run.end()
        assert ended.code == 1
        assert "could not be written: No space left on device; free space on its disk, and continue" in ended.err
        assert f"flockstep resume {record}\n" in ended.err
        (place / "filler").unlink()
        assert run_command(["resume", str(record)]) == 0
        assert RunFolder(record).read_summary().steps == 300


@pytest.mark.full
@pytest.mark.parametrize("name", registry.names("strategy"))
def test_every_strategy_resumes_from_a_checkpoint_or_refuses_to_write_one(name: str, tmp_path: Path) -> None:
    """The first checkpoint of a run that has ended is resumed, as if the run had been killed after it."""
    traits, folder = Strategy.parse(name).traits, tmp_path / "run"
    words = ["train", paced(tmp_path), "-s", name, "-n", "4", "--steps", "80", "--checkpoint-every", "20"]
    ended = RealRun([*words, "--keep", "9"], folder).end()
    if not (traits.checkpoints and traits.restarts):
        assert ended.code == 2
        assert "has no checkpoints, because" in ended.err
        return
    assert ended.code == 0, ended.err
    whole, record = RunFolder(folder).read_result()[0], RunFolder(folder)
    first, *others = disk.folders(folder)
    for other in others:
        disk.remove(other)
    assert disk.read_manifest(first).workers == 4
    record.summary_file.unlink()
    record.result_file.unlink()
    again = resumed(tmp_path)
    assert again.code == 0, again.err
    if traits.delivery == "synchronous":
        assert record.read_result()[0].tobytes() == whole.tobytes()
    elif traits.fixed_steps:
        assert record.read_summary().steps == 4 * 80


def made(folder: Path, strategy: str = "all_reduce") -> Path:
    """A run of two workers with two checkpoints, stopped by a signal."""
    run = begin(folder, strategy)
    wait_until(lambda: (folder / "run/checkpoints/000002/manifest.json").exists(), PATIENCE, "two checkpoints")
    run.fault(signal.SIGINT, "main")
    run.end()
    return folder / "run"


def test_what_cannot_be_resumed_is_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(folder: Path) -> str:
        assert run_command(["resume", str(folder)]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        return said

    run = made(tmp_path)
    last = disk.folders(run)[-1]
    shard, manifest = last / "worker-1.safetensors", disk.read_manifest(last)
    bytes_, text = shard.read_bytes(), (last / disk.MANIFEST).read_bytes()

    shard.write_bytes(bytes_[:-1] + bytes([bytes_[-1] ^ 1]))
    assert f"{shard} is damaged: its bytes differ from those written; delete {last} to resume from the" in refused(run)
    shard.unlink()
    assert f"{shard} cannot be read: No such file or directory; delete {last}" in refused(run)
    shard.write_bytes(bytes_)

    (last / disk.MANIFEST).write_bytes(text.replace(b'"seconds": ', b'"seconds": 1'))
    assert "is damaged: its hash does not match its content" in refused(run)
    for change, said in [
        ({"version": "0.0.1"}, "was written by flockstep 0.0.1, but this is"),
        ({"format": 1}, "has format 1 and was written by flockstep"),
        (
            {"strategy": "gossip"},
            "was written by a run of gossip, but the run's config.toml names all_reduce; restore config.toml",
        ),
        ({"config": "0"}, "config.toml is not the configuration with which"),
        (
            {"workers": 3},
            "holds the state of 3 workers, the run's config.toml says 2; restore config.toml, and resume with -n 2",
        ),
    ]:
        disk.write_manifest(last, msgspec.structs.replace(manifest, **change))
        assert said in refused(run)
    disk.write_manifest(last, manifest)

    config = RunFolder(run).read_config()
    RunFolder(run).write_config(replace(config, lr=7.0))
    assert (
        f"config.toml is not the configuration with which {last} was written: it was changed since, or another build "
        "of flockstep wrote it; restore config.toml, resume with that build, or start another run" in refused(run)
    )
    RunFolder(run).write_config(config)

    job = Path(RunFolder(run).read_config().job)
    job.write_text(job.read_text() + "\n")
    assert "paced.py has changed since the run began" in refused(run)
    RunFolder(run).write_config(replace(config, kind="simulate"))
    assert "holds a run of flockstep simulate, which cannot be resumed; repeat the run: flockstep simulate" in refused(
        run
    )
    for folder in disk.folders(run):
        (folder / disk.MANIFEST).unlink()
    RunFolder(run).write_config(config)
    assert "holds no complete checkpoint; repeat the run, with --checkpoint-every" in refused(run)
    assert "contains no run: config.toml is missing" in refused(tmp_path)
    assert f"there is no folder {tmp_path / 'nowhere'}; name the folder of a run" in refused(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-s", "hogwild", "--checkpoint-every", "10"], "has no checkpoints, because no single node holds its state"),
        (["-s", "sandblaster", "--checkpoint-every", "10"], "because not all of its nodes can stop between two steps"),
        (["-s", "all_reduce", "--checkpoint-every", "often"], "checkpoint_every must be a number of steps or a time"),
        (["-s", "all_reduce", "--checkpoint-every", "0"], "must be a number of steps or a time > 0, got '0'"),
        (["-s", "all_reduce", "--keep", "0"], "keep must be >= 1, got 0; 2 is usual"),
    ],
)
def test_bad_options_are_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["train", "softmax", "-n", "2", *words, "--out", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
