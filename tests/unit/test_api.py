"""The functions and classes that are imported from `flockstep`, against the commands that do the same."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import flockstep
from flockstep.cli.app import run as command
from flockstep.errors import ConfigurationError, Diverged


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert command([*words, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_every_public_name_is_there_and_is_the_one_of_its_module() -> None:
    for name in flockstep.__all__:
        assert getattr(flockstep, name) is not None
    for name, home in flockstep._HOME_OF.items():
        assert getattr(flockstep, name) is getattr(import_module(f"flockstep.{home}"), name)
    assert set(flockstep._HOME_OF) <= set(flockstep.__all__) <= set(dir(flockstep))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = flockstep.nothing


def test_a_strategy_author_sees_no_function_for_drivers() -> None:
    for kind in (flockstep.Worker, flockstep.Server):
        shown = {name: getattr(kind, name).__doc__ or "" for name in dir(kind) if not name.startswith("_")}
        assert [name for name, text in shown.items() if "river" in text] == []


def test_a_simulation_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []
    made = flockstep.simulate(
        "softmax",
        "gossip",
        workers=4,
        steps=5,
        seed=3,
        network="100mbit",
        watch=lambda done, every, t: seen.append(done),
    )
    words = ["simulate", "softmax", "-s", "gossip", "-n", "4", "--steps", "5", "--seed", "3", "--network", "100mbit"]
    want = said([*words, "--out", "other"], capsys)
    assert seen[-1] == 20
    assert (made.summary.seconds, made.summary.final_metric) == (want["seconds"], want["final_metric"])
    other = flockstep.RunResult.read("other")
    assert other.config == made.config
    assert np.array_equal(other.parameters()[0], made.parameters()[0])
    assert len(other.events()) == len(made.events()) > 0
    assert "gossip" in str(made)
    assert made.folder.is_relative_to("runs")


def test_a_real_run_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    made = flockstep.run("softmax", "bsp", workers=2, steps=3, seed=3, out="one")
    said(["train", "softmax", "-s", "bsp", "-n", "2", "--steps", "3", "--seed", "3", "--out", "two"], capsys)
    assert made.summary.clock == "real"
    other = flockstep.RunResult.read("two")
    assert other.config == made.config
    assert np.array_equal(other.parameters()[0], made.parameters()[0])


def test_a_comparison_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    strategies = ["gossip", "all_reduce"]
    made = flockstep.compare("quadratic", strategies, simulated=True, workers=4, steps=20, seeds=2, out="one")
    words = ["compare", "quadratic", "-s", "gossip", "-s", "all_reduce", "--simulate", "-n", "4", "--steps", "20"]
    want = said([*words, "--seeds", "2", "--out", "two"], capsys)
    assert [group.document(group in made.chosen) for group in made.groups] == want["medians"]
    assert [one.config for one in made.runs] == [
        flockstep.RunResult.read(Path("two") / one.folder.name).config for one in made.runs
    ]
    assert {one.strategy for one in made.summaries} == set(strategies)
    assert made.report.read_text().startswith("<!DOCTYPE html>")
    text = str(made)
    assert all(strategy in text for strategy in strategies)
    assert text.endswith(f"report: {made.report}")


def test_a_comparison_tells_what_diverged() -> None:
    made = flockstep.compare("quadratic", ["broadcast"], simulated=True, workers=8, steps=150, lr=1.2, out="c")
    assert len(made.failures) == 1
    assert made.failures[0].startswith("broadcast: ")
    with pytest.raises(Diverged, match="lower"):
        flockstep.simulate("quadratic", "broadcast", workers=8, steps=150, lr=1.2, network="1gbit")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"network": "100mbit"},
            r"--network 100mbit has an effect in virtual time only; add --simulate \(in Python, simulated=True\)",
        ),
        ({"cluster": "edge"}, "--cluster edge has an effect in virtual time only"),
        ({"until_target": True}, "--until-target True has an effect in virtual time only"),
        ({"simulated": True, "transport": "tcp"}, "--transport tcp is for real processes only"),
        ({"simulated": True, "heartbeat": 4.0}, "--heartbeat 4.0 is for real processes only"),
        ({"simulated": True, "lr": 0.1, "lr_grid": (0.1, 0.2)}, "contradict each other"),
        ({"simulated": True, "lr_grid": (0.1, 0.1)}, "lr_grid must be different numbers > 0"),
        ({"simulated": True, "seeds": 0}, "seeds must be >= 1"),
        (
            {"faults": ["dies(0, 1)"]},
            r"dies\(node=0, at=1.0\) happens in virtual time only; use flockstep simulate, or",
        ),
        ({"heartbeat": 0}, "heartbeat must be >= 1 s"),
        ({"transport": ""}, "transport"),
        ({"simulated": True, "network": ""}, "network"),
        ({"simulated": True, "compute": ""}, "compute"),
        ({"strategies": []}, "needs at least one strategy, got none"),
        ({"strategies": "gossip"}, r"strategies must be a list, got 'gossip'; write \['gossip'\]"),
        ({"simulated": True, "faults": "drops(0, -1)"}, "faults must be a list"),
        ({"imports": "mine.py"}, "imports must be a list"),
        ({"lr_grid": "0.1,0.3"}, "lr_grid must be a list"),
    ],
)
def test_arguments_that_would_not_be_used_are_refused(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        flockstep.compare("softmax", **{"strategies": ["asgd"], "steps": 3, **arguments})  # type: ignore[arg-type]
    assert not Path("runs").exists()


def test_a_simulation_and_a_comparison_take_the_links_and_times_of_a_cluster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    single = flockstep.simulate("quadratic", "ps", workers=2, steps=2, cluster="edge", out="a")
    assert command(shlex.split("simulate quadratic -s ps -n 2 --steps 2 --cluster edge --out b")) == 0
    assert single.config == flockstep.RunResult.read("b").config
    assert single.config.cluster == "edge"
    assert single.config.network != flockstep.simulate("quadratic", "ps", workers=2, steps=2, out="c").config.network
    both = flockstep.compare("quadratic", ["ps", "ps(codec=half)"], simulated=True, workers=2, steps=2, cluster="edge",
                             out="d")  # fmt: skip
    plain, coded, alone = (run.config for run in both.runs)
    assert plain == single.config
    assert (alone.workers, alone.cluster) == (1, "edge")
    assert (coded.cluster, coded.compute != plain.compute) == ("edge", True)  # encoding takes time of each step
    words = "compare quadratic -s ps -s ps(codec=half) --simulate -n 2 --steps 2 --cluster edge --out d"
    assert command(words.split()) == 0
    assert capsys.readouterr().err.count("kept from before") == 3


@pytest.mark.parametrize("name", ["network", "compute"])
def test_a_cluster_says_network_and_compute_model_already(name: str) -> None:
    given = {"network": "1gbit", "compute": "constant(0.01)"}[name]
    with pytest.raises(ConfigurationError, match="and cluster edge both describe the cluster; give only one of them"):
        flockstep.simulate("quadratic", "ps", cluster="edge", **{name: given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"workers": "8"}, "workers must be a whole number, got '8'; write it like workers=4"),
        ({"lr": "0.1"}, "lr must be a number, got '0.1'; write it like lr=0.1"),
        ({"steps": 2.5}, "steps must be a whole number, got 2.5"),
        ({"seed": None}, "seed must be a whole number, got None"),
    ],
)
def test_a_value_that_is_no_number_is_refused_by_a_sentence(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        flockstep.simulate("quadratic", "asgd", **arguments)  # type: ignore[arg-type]
    assert not Path("runs").exists()


COMPARISON = 'import flockstep\nflockstep.compare("softmax", ["bsp"], workers=2, steps=2)\n'
RUN = 'import flockstep\nif __name__ == "__main__":\n    flockstep.run("softmax", "bsp", workers=2, steps=2)\n'


def test_an_unguarded_comparison_leaves_one_folder_and_a_sentence() -> None:
    Path("mine.py").write_text(COMPARISON)
    ended = subprocess.run([sys.executable, "mine.py"], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert 'put the call under if __name__ == "__main__":' in ended.stderr
    assert len(list(Path("runs").iterdir())) == 1


@pytest.mark.parametrize("program", [RUN, COMPARISON])
def test_a_program_from_standard_input_is_refused(program: str) -> None:
    ended = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, check=False)
    assert ended.stderr.count("Traceback") == 1
    assert "must be a file, got <stdin>; write the program into a .py file" in ended.stderr
    assert not Path("runs").exists()


def test_a_program_on_the_command_line_may_start_a_run() -> None:
    ended = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_a_plan_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["all_reduce", "local_sgd"]
    made = flockstep.plan("softmax", "edge", strategies=chosen, workers=4, require=["reproducible"])
    words = ["plan", "softmax", "-c", "edge", "-n", "4", "--require", "reproducible"]
    want = said([*words, "-s", "all_reduce", "-s", "local_sgd"], capsys)
    document = json.loads(json.dumps(made.document()))
    for one in (document, want):  # the notes tell the CPU seconds
        assert len(one["trials"].pop("notes")) == 1
    assert document == want
    assert want["trials"]["interrupted"] is False  # type: ignore[index]
    assert {one.name for one in made.outlook.predictions} == {one["name"] for one in want["strategies"]}  # type: ignore[attr-defined]
    assert made.choice == want["advice"]["choice"]  # type: ignore[index]
    assert made.advice.sentences[0] in str(made)
    assert made.write("plan.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("name", ["require", "strategies", "imports"])
def test_a_text_for_a_list_of_a_plan_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} must be a list, got 'elastic'"):
        flockstep.plan("softmax", "laptop", **{name: "elastic"})  # type: ignore[arg-type]


def test_an_unknown_need_of_a_plan_is_refused_before_anything_is_read() -> None:
    with pytest.raises(ConfigurationError, match="no requirement is called 'elastik'; did you mean 'elastic'"):
        flockstep.plan("no such job", "no such cluster", require=["elastik"])


def test_a_strategy_is_given_as_text_or_as_an_object() -> None:
    from flockstep.strategies.gossip import Gossip

    texts = [flockstep.simulate("quadratic", one, workers=2, steps=2, out=out).config.strategy
             for one, out in (("gossip", "a"), (Gossip(), "b"))]  # fmt: skip
    assert texts[0] == texts[1] == "gossip"
