"""The command itself is interrupted or killed: nothing is left behind, and the record can be read."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from flockstep.errors import Interrupted
from flockstep.launchers.completion import finished
from flockstep.records.config import RunConfig
from flockstep.records.events import Event
from flockstep.records.folder import RunFolder
from support.jobs import go_on, paced
from support.matrix import few
from support.processes import IPC, PATIENCE, RealRun, alive, open_files, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")

ENDLESS = ["-n", "3", "--steps", "1000000"]


@pytest.mark.parametrize("strategy", few(["all_reduce", "asgd"], "asgd"))
@pytest.mark.parametrize(
    ("kind", "whom"),
    few(
        [
            (signal.SIGINT, "main"),
            (signal.SIGINT, "group"),
            (signal.SIGTERM, "main"),
            (signal.SIGTERM, "group"),
            (signal.SIGHUP, "group"),
        ],
        (signal.SIGINT, "group"),
    ),
)
def test_an_interrupted_run_ends_cleanly(strategy: str, kind: signal.Signals, whom: str, tmp_path: Path) -> None:
    run = RealRun(["train", "softmax", "-s", strategy, *ENDLESS], tmp_path / "run")
    run.wait_for_work()
    run.fault(kind, whom)
    ended = run.end()
    assert ended.seconds < ended.limit
    assert ended.code == 130
    why = {
        signal.SIGINT: "interrupted",
        signal.SIGTERM: "stopped by SIGTERM",
        signal.SIGHUP: "stopped by SIGHUP because the terminal has closed",
    }[kind]
    kept = rf"; flockstep resume {re.escape(str((tmp_path / 'run').resolve()))} continues from step [0-9]+\n"
    assert re.fullmatch(rf"flockstep: {why}; everything computed so far is in the record{kept}", ended.err)
    assert ended.summary is not None
    assert ended.summary["status"] == "interrupted"
    assert ended.summary["best_metric"] is not None
    assert len(RunFolder(tmp_path / "run").read().events) > 100


@pytest.mark.parametrize(
    ("strategy", "before", "why"),
    [
        pytest.param("hogwild", "", "because a run with hogwild has no checkpoints\n", marks=pytest.mark.full),
        (
            "asgd",
            "supervisor.LAST_CHECKPOINT = 0",
            (
                "because (not all workers had stopped|it was not written) within 0 s; "
                "flockstep resume .* continues from step [0-9]+, the step of the previous checkpoint\n"
            ),
        ),
    ],
)
def test_a_run_without_a_last_checkpoint_says_why(strategy: str, before: str, why: str, tmp_path: Path) -> None:
    every = [] if strategy == "hogwild" else ["--checkpoint-every", "20"]
    run = RealRun(["train", "softmax", "-s", strategy, *ENDLESS, *every], tmp_path / "run", before=before)
    run.wait_for_work()
    if every:
        manifests = tmp_path / "run" / "checkpoints"
        wait_until(lambda: any(manifests.glob("*/manifest.json")), PATIENCE, "a checkpoint")
    run.fault(signal.SIGTERM, "main")
    assert re.fullmatch(f"flockstep: .*; no checkpoint was taken at the end, {why}", run.end().err)


def test_a_second_signal_waits_until_the_record_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(kind="train", job="softmax", strategy="asgd", workers=2)
    merged = RunFolder.merge_events

    def interrupted(record: RunFolder) -> list[Event]:
        os.kill(os.getpid(), signal.SIGINT)
        return merged(record)

    monkeypatch.setattr(RunFolder, "merge_events", interrupted)
    record = RunFolder(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        with record.created(config), finished(record, config):
            raise Interrupted("stopped by SIGTERM")
    assert record.read_summary().error == "stopped by SIGTERM"


def test_killing_the_supervisor_leaves_no_process_and_a_readable_record(tmp_path: Path) -> None:
    run = RealRun(["train", "softmax", "-s", "asgd", *ENDLESS], tmp_path / "run")
    run.wait_for_work()
    assert set(run.nodes) == {"worker-0", "worker-1", "worker-2", "server-0"}
    wait_until(lambda: run.evaluating(), PATIENCE, "an evaluation goes on")
    assert not any(str(run.record.resolve()) in file for pid in run.nodes.values() for file in open_files(pid))
    run.fault(signal.SIGKILL, "main")
    wait_until(lambda: not any(map(alive, run.nodes.values())), PATIENCE, "orphans gone")
    run.end()
    record = RunFolder(tmp_path / "run").read()
    assert record.summary.status == "interrupted"
    assert record.summary.steps > 100


def test_an_interrupted_comparison_keeps_what_is_finished_and_goes_on(tmp_path: Path) -> None:
    strategies = ["-s", "gossip", "-s", "all_reduce"]
    job = paced(tmp_path, after="c/gossip/summary.json", slow_after=40)
    options = ["-n", "2", "--epochs", "5", *IPC]
    run = RealRun(["compare", job, *strategies, *options], tmp_path / "c")
    wait_until(lambda: (tmp_path / "c/gossip/summary.json").exists(), PATIENCE, "the first run finished")
    run.record = tmp_path / "c/all-reduce"
    run.wait_for_work(steps=20)
    run.fault(signal.SIGINT, "main")
    ended = run.end()
    assert ended.code == 130
    assert "finished runs are kept: repeat the command with --out" in ended.err
    assert "gossip" in (tmp_path / "c/report.html").read_text("utf-8")
    before = (tmp_path / "c/gossip/events.jsonl").stat().st_mtime_ns
    go_on(tmp_path)
    again = RealRun(["compare", job, *strategies, *options, "--json"], tmp_path / "c").end()
    assert again.code == 0, again.err
    assert again.err.count("kept from before") == 1
    assert {row["status"] for row in json.loads(again.out)["runs"]} == {"finished"}
    assert (tmp_path / "c/gossip/events.jsonl").stat().st_mtime_ns == before


def test_workers_of_a_stopped_command_say_why_they_ended(tmp_path: Path) -> None:
    """SIGSTOP stops the command for longer than the heartbeat; the reason is told when it goes on."""
    run = RealRun(["train", "softmax", "-s", "all_reduce", *ENDLESS, "--heartbeat", "1"], tmp_path / "run")
    run.wait_for_work()
    run.fault(signal.SIGSTOP, "main")
    wait_until(lambda: not run.working(), PATIENCE, "all workers end")
    os.kill(run.main.pid, signal.SIGCONT)
    ended = run.end()
    assert ended.code == 1
    why = r"ended, because the process that supervises the run did not answer it within the heartbeat: that process "
    assert re.search(rf"worker \d {why}was stopped, or the machine is too busy; raise --heartbeat", ended.err), (
        ended.err
    )
    assert ended.summary is not None
    assert ended.summary["status"] == "failed"
