"""Options that mean nothing where they are given, a script's own options, and what the system refuses."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from flockstep.cli.app import run
from flockstep.launchers import slurm
from flockstep.launchers.children import Child
from flockstep.simulation.network import Network
from support.jobs import run_of, supervised
from support.processes import RealRun

QUICK = ["-n", "2", "--steps", "3"]
DRAWN = """
from dataclasses import dataclass

from flockstep import registry
from flockstep.strategies.base import Strategy, Traits


@dataclass(frozen=True)
class Drawn(Strategy):
    @property
    def traits(self):
        return Traits(delivery="synchronous", survives=False, results=("server",))

    @property
    def servers(self):
        return 1

    async def worker(self, me):
        while me.training:
            await me.gradient()

    async def finish(self, me):
        me.leave()

    async def master(self, me):
        async for _ in me.messages():
            me.params[:] = me.random.random(len(me.params))


registry.register("strategy", "drawn", Drawn)
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--lr", "abc"], "--lr must be a number, got 'abc'; write it like 0.1"),
        (["-n", "1.5"], "--workers must be a whole number, got '1.5'; write it like 4"),
    ],
)
def test_an_option_that_takes_a_number_names_it(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "softmax", "-s", "asgd", *options]) == 2
    assert capsys.readouterr().err == f"flockstep: {sentence}\n"


@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_the_help_of_network_tells_names_from_a_link_of_ones_own(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["help", command])
    words = " ".join(capsys.readouterr().out.split())
    found = re.search(r"a name \((.*?)\) or a bandwidth and a latency, as in \"(.*?)\"; see `(.*?)`", words)
    assert found is not None
    assert all("(" not in str(name) and Network.parse(name) for name in found[1].split(", "))
    assert str(Network.parse(found[2])).startswith("link(bandwidth=")
    assert run(found[3].split()[1:]) == 0


def test_strategies_whose_names_begin_alike_do_not_share_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    rule = "ps(consistency=asynchronous, server_update=delay_compensated(form='constant', lambda0={}))"
    arguments = ["compare", "quadratic", "--simulate", *QUICK, "--no-reference", "--out", "c", "--json"]
    strategies = [text for value in (0.5, 0.6) for text in ("-s", rule.format(value))]
    assert run([*arguments, *strategies]) == 0
    assert len({run["folder"] for run in json.loads(capsys.readouterr().out)["runs"]}) == 2
    assert run([*arguments, *strategies]) == 0
    assert capsys.readouterr().err.count("kept from before") == 2


def test_a_scripts_own_debug_option_is_the_scripts(capfd: pytest.CaptureFixture[str]) -> None:
    Path("script.py").write_text("import sys\nprint(sys.argv[1:])\n")
    assert run(["launch", "-n", "1", "script.py", "--debug", "-x"]) == 1
    out, err = capfd.readouterr()
    assert out == "['--debug', '-x']\n"
    assert "Traceback" not in err
    assert run(["launch", "-n", "1", "--debug", "script.py"]) == 1
    out, err = capfd.readouterr()
    assert out == "[]\n"
    assert "Traceback" in err


@pytest.mark.parametrize("words", ["-- script.py -n 2", "script.py -n 2 -x --nine"])
def test_a_script_gets_its_own_options(words: str, capfd: pytest.CaptureFixture[str]) -> None:
    Path("script.py").write_text("import sys\nprint(sys.argv[1:])\n")
    run(["launch", "-n", "1", *words.split()])
    assert capfd.readouterr().out == f"{words.partition('script.py')[2].split()}\n"


def test_a_place_that_cannot_be_written_to(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    assert run(["simulate", "quadratic", "-s", "asgd", *QUICK, "--out", "file/run"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("flockstep: cannot use ")
    assert "Not a directory" in err
    assert len(err.splitlines()) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")
def test_what_a_server_draws_depends_on_the_seed(tmp_path: Path) -> None:
    (tmp_path / "drawn.py").write_text(DRAWN)
    hashes = []
    for kind, seed in (("train", "5"), ("simulate", "5"), ("simulate", "6")):
        job = ["quadratic", "-s", "drawn", "-n", "1", "--steps", "1", "--import", str(tmp_path / "drawn.py")]
        run = RealRun([kind, *job, "--seed", seed, "--json"], tmp_path / f"{kind}-{seed}")
        hashes.append(json.loads(run.end().out)["result_hash"])
        run.close()
        RealRun.started.remove(run)
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_system_that_gives_no_process_ends_the_run_in_order(tmp_path: Path) -> None:
    def refused(*_: object) -> Child:
        raise OSError("no more processes")

    supervisor = supervised(run_of(2), tmp_path / "run", refused)
    assert str(supervisor.run().error) == "the run could not be supervised: OSError: no more processes"


@pytest.mark.parametrize("command", ["train", "simulate"])
def test_a_batch_of_more_samples_than_there_are_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each batch is filled up with samples that it has already; a job's own batch is its author's decision."""
    assert run([command, "quadratic", "-s", "all_reduce", *QUICK, "--batch", "100000", "--out", "runs/a"]) == 2
    assert "batch must be <= 2048, the number of training samples, got 100000, with which" in capsys.readouterr().err
    assert not Path("runs/a").exists()


def test_a_batch_of_all_samples_is_accepted() -> None:
    assert run(["simulate", "quadratic", "-s", "all_reduce", *QUICK, "--batch", "2048", "--out", "runs/a"]) == 0
    imports = "import dataclasses\nfrom flockstep.runtime.setup import load_job\n"
    own = f"{imports}job = lambda: dataclasses.replace(load_job('quadratic', 0), batch=4000)"
    Path("own.py").write_text(own)
    assert run(["simulate", "own.py", "-s", "all_reduce", *QUICK, "--out", "runs/b"]) == 0


@pytest.mark.parametrize(
    ("words", "submitted"),
    [
        ("train softmax -s bsp -n 4 --out r", ["train", "softmax", "-s", "bsp", "-n", "4", "--out", "r"]),
        ("launch -n 4 --out r script.py --nodes 3", ["launch", "-n", "4", "--out", "r", "script.py", "--nodes", "3"]),
    ],
)
def test_a_job_of_slurm_runs_the_command_without_the_options_for_its_submission(
    words: str, submitted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []
    monkeypatch.setattr(slurm, "submitted", lambda *arguments: given.extend(arguments) or 5)
    Path("script.py").write_text("")
    name, *own = words.split()
    more = ["--on", "slurm", "--nodes", "2"]
    assert run([name, *more, "--cpus-per-worker", "2", "--slurm-options=-p x", *own]) == 5
    assert given == [[name, *more, *submitted[1:]], Path("r"), 4, 2, 2.0, 0.0, "-p x", sys.executable]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--hosts a:2 --nodes 2", "--nodes 2 cannot be combined with --hosts; leave one of them out"),
        ("--on slurm --coordinator d0:1", "--coordinator d0:1 cannot be combined with --on slurm; leave it out"),
        ("--node-rank 1", "--node-rank 1 is for several hosts; add --nodes"),
        ("--gpus-per-worker 1", "--gpus-per-worker 1.0 is for a cluster; add --on slurm or --on ray"),
        ("--ssh s", "--ssh s is for hosts that ssh reaches; add --hosts"),
        ("--on ray --coordinator d0:1", "is for hosts that you start yourself; leave it out with --on ray"),
        ("--nodes 2", "a run over 2 hosts needs --node-rank; for example: --nodes 2 --node-rank 0 --coordinator"),
    ],
)
def test_options_about_hosts_that_do_not_go_together(
    options: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "softmax", "-s", "bsp", *options.split()]) == 2
    assert sentence in capsys.readouterr().err
    assert not Path("runs").exists()
