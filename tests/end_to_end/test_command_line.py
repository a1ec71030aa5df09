"""The command line as a user meets it: outcomes, and one clear sentence for every mistake."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import flockstep
from flockstep import registry
from flockstep.cli import show
from flockstep.cli.app import run
from flockstep.costs.clusters import names
from flockstep.costs.reference import MODELS
from flockstep.expression import fields_of
from flockstep.launchers import supervisor
from flockstep.launchers.wait_monitor import WaitMonitor
from flockstep.records.events import StepEvent
from flockstep.records.folder import RunFolder
from support.processes import RealRun

FAST = ["--steps", "20", "--seed", "1"]
NO_STRATEGY = (["train", "softmax"], ["simulate", "softmax"], ["compare", "softmax"], ["chaos", "softmax"])


def outcome(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = run(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervisor, "WaitMonitor", partial(WaitMonitor, period=3600.0))  # a busy machine is not told of
    monkeypatch.setattr(show, "PERIOD", 3600.0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "softmax", "-s", "gosip"], "no strategy is called 'gosip'; did you mean 'gossip'?"),
        (["train", "..", "-s", "gossip"], "Python file, and .. is a folder; give the path of a .py file, or see"),
        (["train", "sofmax", "-s", "gossip"], "no workload is called 'sofmax'; did you mean 'softmax'?"),
        (["train", "softmax", "-s", "easgd(perod=3)"], "argument of easgd is called 'perod'; did you mean 'period'?"),
        (["train", "softmax", "-s", "easgd(alpha=0.7)"], "alpha must be in [0, 0.5], got 0.7; 0.9 / workers is usual"),
        (["train", "softmax", "-s", "ps(ssp(-1))"], "staleness bound must be >= 0, got -1; use asynchronous"),
        (["train", "softmax", "-s", "gossip", "-n", "0"], "workers must be >= 1, got 0; use 1 for plain training"),
        (["train", "softmax", "-s", "gossip", "--steps", "0"], "steps must be > 0, got 0"),
        (["train", "softmax", "-s", "gossip", "--lr", "-1"], "lr must be > 0, got -1"),
        (["train", "softmax", "-s", "gossip", "--result", "server"], "result must be one of mean, rank0, best"),
        (["train", "softmax", "-s", "gossip", "--split", "by-size"], "split"),
        (
            ["train", "softmax", "-s", "gossip", "--transport", "tpc"],
            "no transport is called 'tpc'; did you mean 'tcp'?",
        ),
        (["train", "nowhere.py", "-s", "gossip"], "nowhere.py"),
        (["simulate", "softmax", "-s", "gossip", "--network", "1gbt"], "did you mean '1gbit'?"),
        (
            ["simulate", "softmax", "-s", "gossip", "--network", "10mbits"],
            "two_tier; write link('10mbit', '1ms') for any other bandwidth",
        ),
        (["simulate", "softmax", "-s", "gossip", "--compute", "exponential"], "exponential needs mean"),
        (["simulate", "softmax", "-s", "dpsgd(torus)", "-n", "7"], "torus"),
        (
            ["compare", "softmax", "-s", "gossip", "-s", "gosgd", "--simulate"],
            "gossip is given 2 times; give every strategy once",
        ),
        (["launch", "nowhere.py"], "the script must be a Python file, and nowhere.py does not exist; give the path"),
        (["launch", "."], "the script must be a Python file, and . is a folder; give the path of a .py file"),
        (["launch", "run.toml"], "the script must be a Python file, and run.toml is a .toml file; give the path"),
        (["launch", "-n", "2", "wrong.py"], "the script wrong.py cannot run, because of a syntax error in line 2: "),
        (["launch", "-n", "100000", "right.py"], "would not all answer within --heartbeat 5; use at most "),
        (["train", "softmax", "-s", "bsp", "-n", "100000"], "would not all answer within --heartbeat 5; use at most "),
        (
            [*("train", "softmax", "-s", "bsp", "--target", "0.9"), *("--steps", "20", "--evaluate-every", "20")],
            "target 0.9 needs an evaluation before the last step, got evaluate_every 20 and steps 20; lower",
        ),
        (["train", "softmax", "-s", "bsp", "--steps", "1e3"], "got '1e3'; write it like 1000"),
        (["simulate", "softmax", "-s", "bsp", "--network", "10 Gbit/s"], "'10 Gbit/s'; did you mean '10gbit'?"),
        (["simulate", "softmax", "-s", "bsp", "--network", "7.5Gbps"], "write link('10mbit', '1ms') for any other"),
        (["train", "softmax", "-s", "bsp", "--codec", "topk"], "because a codec is an argument of the strategy; write"),
        (["simulate", "softmax", "-s", "bsp", "--cluster", "nowhere"], "no cluster is called 'nowhere'; known: "),
        (["manifest"], "flockstep manifest needs COMMAND: command of the run, written as for one host: flockstep"),
        (["launch", "--stps", "nowhere.py"], "flockstep launch has no option --stps"),
        (["list", "clustr"], "no kind or component is called 'clustr'; did you mean 'cluster'?"),
        (["list", "BigDl"], "no kind or component is called 'BigDl'; did you mean 'BigDL'?"),
        (["list", "stratgies"], "no kind or component is called 'stratgies'; did you mean 'strategies'?"),
        (["report", "nowhere"], "there is no folder nowhere; name the folder of a run or of a comparison"),
        (["resume", "nowhere"], "there is no folder nowhere; name the folder of a run"),
        (["report", "."], "contains no run: config.toml is missing; name the folder of a run or of a comparison"),
        (["trian", "softmax"], "no command is called 'trian'; did you mean 'train'?"),
        *((words, f"flockstep {words[0]} needs a strategy after -s, such as all_reduce, ") for words in NO_STRATEGY),
        (
            ["plan", "softmax", "--need", "elastic"],
            "no option of flockstep plan is called '--need'; it is now called '--require'",
        ),
        (["bench", "collectives", "--way", "ring"], "'--way'; it is now called '--implementation'"),
        (
            ["train", "softmax", "-s", "gossip", "--stps", "3"],
            "no option of flockstep train is called '--stps'; did you mean '--steps'",
        ),
        (
            ["train", "softmax", "-s", "gossip", "--network", "100mbit"],
            "--network has an effect in virtual time only; leave it out, or use flockstep simulate",
        ),
    ],
)
def test_bad_input_ends_with_a_sentence_before_anything_starts(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("wrong.py", "x = 1\nif:\n"), ("right.py", "print('begun')\n"), ("run.toml", "[run]\nx = 1\n")):
        Path(name).write_text(text)
    code, out, err = outcome(arguments, capsys)
    assert code == 2
    assert sentence in err
    assert err.startswith("flockstep: ")
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err
    assert out == ""
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = 1", "job()"),
        ("def job():\n    return 3", "Job"),
        ("def job():\n    raise KeyError('weights')", "weights"),
        ("def job(:", "job.py"),
    ],
)
def test_a_job_file_that_is_none(text: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.py").write_text(text)
    code, _, err = outcome(["simulate", "job.py", "-s", "gossip"], capsys)
    assert code == 2
    assert sentence in err
    assert len(err.strip().splitlines()) == 1


JOB_FILE = """
import numpy as np
from flockstep import Data, Job
from flockstep.frameworks.numpy import SoftmaxRegression

def data():
    random = np.random.default_rng(0)
    y = random.integers(0, 3, 300)
    x = (np.eye(3)[y] * 3 + random.standard_normal((300, 3))).astype("float32")
    return Data(x[:240], y[:240], x[240:], y[240:])

def job():
    return Job(lambda: SoftmaxRegression(3, 3), data, "sgd(lr=0.3)", batch=8, epochs=3, target=0.8, name="mine")
"""


def test_a_job_in_a_file_of_ones_own_works_like_a_built_in_one(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(JOB_FILE)
    for command in (["simulate", "mine.py", "-s", "gossip", "-n", "3"], ["train", "mine.py", "-s", "asgd", "-n", "2"]):
        code, out, err = outcome([*command, "--json"], capsys)
        assert (code, err) == (0, "")
        assert json.loads(out)["seconds_to_target"] is not None


@pytest.mark.parametrize("command", ["train", "simulate"])
def test_a_target_that_is_not_reached(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [command, "softmax", "-s", "gossip", "-n", "2", *FAST, "--target", "0.9999", "--out", "r", "--json"]
    code, out, err = outcome(arguments, capsys)
    assert code == 1
    assert "did not reach the target 0.9999: its best accuracy was" in err
    assert json.loads(out)["status"] == "finished"


@pytest.mark.parametrize("command", ["train", "simulate"])
def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_record(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [command, "quadratic", "-s", "local_sgd", "-n", "2", "--lr", "1e6", "--steps", "200", "--out", "r"]
    code, _, err = outcome(arguments, capsys)
    assert code == 1
    assert "the loss of worker" in err
    assert "lower the learning rate, now 1e+06" in err
    assert err.startswith("record: r\nflockstep: ")
    assert len(err.strip().splitlines()) == 2
    summary = json.loads(Path("r/summary.json").read_text())
    assert summary["status"] == "diverged"
    assert "the loss of worker" in summary["error"]
    assert any(isinstance(event, StepEvent) for event in RunFolder("r").read_events())


def test_a_comparison_keeps_what_worked_when_one_fails(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", "quadratic", "--simulate", "-n", "8", "--steps", "150", "--lr", "1.2", "--out", "c"]
    code, out, err = outcome([*arguments, "-s", "all_reduce", "-s", "broadcast"], capsys)
    assert code == 1
    assert "broadcast: " in err
    assert "diverged" in out
    assert "finished" in out


FAILS_EARLY = (
    JOB_FILE
    + """
class Failing(SoftmaxRegression):
    def gradients(self, *arguments):
        raise LookupError("no data")

def job():
    return Job(lambda: Failing(3, 3), data, "sgd(lr=0.3)", name="mine")
"""
)


def test_debug_is_in_the_help_and_no_message_with_it_advises_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    assert "--debug" in capfd.readouterr().out
    Path("fails.py").write_text("import flockstep\nflockstep.join()\nraise LookupError('no data')\n")
    for debug in ([], ["--debug"]):
        assert run([*debug, "launch", "-n", "1", "--transport", "ipc", "fails.py"]) == 1
        said = capfd.readouterr().err.splitlines()[-1]
        assert "raised LookupError: no data (fails.py, line 3)" in said
        assert said.endswith("; --debug shows the traceback") == (not debug)


def test_a_run_that_fails_before_its_first_step_names_its_folder(capfd: pytest.CaptureFixture[str]) -> None:
    Path("early.py").write_text(FAILS_EARLY)
    Path("fails.py").write_text("import flockstep\nassert flockstep.workers() == 2\nraise LookupError('no data')\n")
    for words in (
        ["train", "early.py", "-s", "gossip", "-n", "2", "--transport", "ipc"],
        ["launch", "-n", "2", "--transport", "ipc", "fails.py"],
        ["simulate", "early.py", "-s", "gossip", "-n", "2"],
    ):
        assert run(words) == 1
        err = capfd.readouterr().err
        assert "record: runs/" in err
    assert err.endswith(
        "flockstep: the simulation raised LookupError: no data (early.py, line 17); --debug shows the traceback\n"
    )


CUSTOM = '''
from dataclasses import dataclass
from flockstep import register
from flockstep.strategies.local_sgd import LocalSGD


@dataclass(frozen=True)
class Mine(LocalSGD):
    """Local SGD by another name."""


register("strategy", "mine_of_the_list", Mine)
'''


def listed(*words: str) -> list[dict[str, object]]:
    """Rows of `flockstep list` in a process of its own, whose registry nobody shares."""
    command = [sys.executable, "-c", "from flockstep.cli import main; main()", "list", *words]
    done = subprocess.run([*command, "--import", "listed.py", "--json"], capture_output=True, text=True, check=True)
    rows: list[dict[str, object]] = json.loads(done.stdout)
    return rows


def test_components_of_an_imported_file_are_listed_as_custom() -> None:
    Path("listed.py").write_text(CUSTOM)
    summaries = {row["name"]: str(row["summary"]) for row in listed("strategies")}
    assert summaries["mine_of_the_list"].startswith("Custom: Local SGD by another name.")
    assert [name for name, text in summaries.items() if text.startswith("Custom:")] == ["mine_of_the_list"]
    custom = {row["noun"]: row["custom"] for row in listed() if row["custom"]}
    assert custom == {"strategy": ["mine_of_the_list"]}


def test_the_list_is_a_summary_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(["list", "--json"], capsys)
    assert code == 0
    rows = json.loads(out)
    assert [row["noun"] for row in rows] == [*registry.nouns(), "cluster", "model"]
    assert all(row["summary"] and row["count"] == len(row["names"]) > 0 for row in rows)
    code, out, _ = outcome(["list"], capsys)
    assert code == 0
    assert len(out.splitlines()) <= len(rows) + 6
    assert all(row["plural"] in out for row in rows)


def test_everything_is_listed_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(["list", "--all", "--json"], capsys)
    assert code == 0
    rows = json.loads(out)
    written = {(row["noun"], row["name"]) for row in rows}
    assert written >= {(noun, name) for noun in registry.nouns() for name in registry.names(noun)}
    assert all(row["summary"] for row in rows)


def test_one_component_is_listed_with_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(["list", "ring", "--json"], capsys)
    assert code == 0
    assert [row["noun"] for row in json.loads(out)] == ["topology", "collective"]
    code, out, _ = outcome(["list", "topk", "--json"], capsys)
    (row,) = json.loads(out)
    assert row["write"].startswith("topk(")
    assert [argument["name"] for argument in row["arguments"]] == list(fields_of(registry.load("codec", "topk")))
    code, out, _ = outcome(["list", "BigDL"], capsys)
    assert (code, "flockstep systems 'BigDL'" in out) == (0, True)
    code, out, _ = outcome(["list", "asgd"], capsys)
    assert "short for ps(consistency=asynchronous)" in out


def test_bare_flockstep_and_help_print_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, bare, _ = outcome([], capsys)
    assert code == 0
    assert "doctor" in bare
    assert outcome(["help"], capsys)[:2] == (0, outcome(["--help"], capsys)[1])
    code, said, _ = outcome(["help", "bench", "codecs"], capsys)
    assert code == 0
    assert said == outcome(["bench", "codecs", "--help"], capsys)[1]
    code, _, err = outcome(["help", "trian"], capsys)
    assert code == 2
    assert "trian" in err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["version"], ["--version"]):
        assert outcome(words, capsys)[:2] == (0, f"flockstep {flockstep.__version__}\n")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("flockstep li", {"list"}),
        ("flockstep list topo", {"topologies"}),
        ("flockstep train softmax -s gos", {"gossip", "gosgd"}),
        ("flockstep train softmax -s BigD", {"BigDL"}),
    ],
)
def test_words_are_completed(words: str, expected: set[str]) -> None:
    environment = {**os.environ, "_FLOCKSTEP_COMPLETE": "bash_complete", "COMP_WORDS": words}
    environment["COMP_CWORD"] = str(len(words.split()) - 1)
    code = "from flockstep.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert {line.partition(",")[2] for line in done.stdout.split()} == expected


def test_what_a_plan_takes_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(["list", "cluster", "--json"], capsys)
    said = {row["write"]: row["summary"] for row in json.loads(out)}
    assert code == 0
    assert set(said) == set(names())
    assert "16 workers on 16 machines; the slowest link has 20 Mbit/s and 30.0 ms." in said["edge"]
    code, out, _ = outcome(["list", "model", "--json"], capsys)
    said = {row["write"]: row["summary"] for row in json.loads(out)}
    assert code == 0
    assert set(said) == set(MODELS)
    assert said["vgg-a"].startswith("132,863,336 parameters in 11 layers")


def test_help_is_printed_in_an_encoding_that_lacks_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="latin-1"))
    assert run(["launch", "--help"]) == 0
    assert b"--workers" in printed.getvalue()


def test_a_command_that_a_signal_ends_names_the_signal(capsys: pytest.CaptureFixture[str]) -> None:
    Path("stops.py").write_text("import signal\nsignal.raise_signal(signal.SIGTERM)\n")
    assert outcome(["list", "--import", "stops.py"], capsys) == (130, "", "flockstep: stopped by SIGTERM\n")


APART = "no worker sent or received parameters in 20 steps: each worker trained by itself"


def test_workers_that_never_exchanged_are_told_under_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["-n", "4", "--steps", "20", "--simulate", "--no-reference", "--out", "c"]
    silent, shared = "local_sgd(period=100)", "hogwild"  # all workers of the second one write to the same array
    code, out, _ = outcome(["compare", "softmax", "-s", silent, "-s", shared, *few], capsys)
    assert code == 0
    said = " ".join(out.split())
    assert f"{silent}: {APART}" in said
    assert said.count("trained by itself") == 1
    notes = [
        run.read_summary().notes for run in map(RunFolder, sorted(Path("c").iterdir())) if run.config_file.exists()
    ]
    assert sorted(len(each) for each in notes) == [0, 1]
    assert "trained by itself" in Path("c/report.html").read_text()


def test_gossip_that_drew_no_exchange_says_how_many_it_expected(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = ["simulate", "softmax", "-s", "gossip", "-n", "2", "--seed", "0", "--steps", "24", "--out", "g"]
    code, out, _ = outcome(drawn, capsys)
    assert code == 0
    said = "No worker sent or received parameters in 24 steps, where gossip is expected to send 4.8 times: each worker"
    assert said[1:] in " ".join(out.split())
    assert RunFolder(Path("g")).read_summary().notes[0].startswith(said)


def test_a_single_run_explains_the_columns_of_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(["simulate", "softmax", "-s", "gossip(p=0.5)", "-n", "2", *FAST], capsys)
    assert code == 0
    said = " ".join(out.split())
    assert "staleness: number of updates applied between reading the parameters and applying the gradient." in said
    assert "trained by itself" not in said


WRONG = """
from dataclasses import dataclass
import flockstep


@dataclass(frozen=True)
class Wrong(flockstep.Strategy):
    @property
    def traits(self):
        return flockstep.Traits(delivery="partial", survives=False, results=("rank0",))

    async def worker(self, me):
        while me.training:
            me.optimizer_step(await me.gradient())
            me.nonsense


flockstep.register("strategy", "wrong", Wrong)
"""


def test_an_error_of_a_strategy_is_named_with_its_worker_step_and_line_in_virtual_time(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    options = ["quadratic", "-s", "wrong", "-n", "2", "--import", str(tmp_path / "wrong.py")]
    said = "worker 0 at step 1 raised AttributeError: 'Worker' object has no attribute 'nonsense' (wrong.py, line 15)"
    for more, shown in [([], False), (["--debug", "--overwrite"], True)]:
        ended = RealRun(["simulate", *options, "--steps", "3", *more], tmp_path / "run").end()
        assert ended.code == 1
        assert f"flockstep: {said}{'' if shown else '; --debug shows the traceback'}\n" in ended.err
        assert ("Traceback" in ended.err) == shown
        assert ended.summary is not None
        assert said in ended.summary["error"]


def test_a_simulation_takes_gradient_times_and_links_from_a_recorded_run(capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", "softmax", "-s", "all_reduce", "-n", "2", "--transport", "tcp", "--steps", "30", "--out", "real"]
    assert outcome(train, capsys)[0] == 0
    law = ["--compute", "record('real')", "--network", "record('real')"]
    code, _, err = outcome(["simulate", "softmax", "-s", "local_sgd", "-n", "3", *law, *FAST, "--out", "told"], capsys)
    assert code == 0, err

    def seconds(folder: str, rank: int) -> list[float]:
        events = RunFolder(folder).read_events()
        return [one.compute_seconds for one in events if isinstance(one, StepEvent) and one.rank == rank][:20]

    for rank in range(3):
        assert seconds("told", rank) == pytest.approx(seconds("real", rank % 2))
    assert str(RunFolder("told").read_config().network).startswith("fair_link(bandwidth=")
