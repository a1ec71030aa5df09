"""Results of sealed jobs that go back: the sender's names, the record, and nothing of the customer's data or paths."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 -- what every user of torch calls it
from safetensors.numpy import load_file

import flockstep
import support.compiler  # noqa: F401
from flockstep.cli.app import run
from flockstep.errors import ConfigurationError
from flockstep.experiments.single import RunResult
from flockstep.frameworks.job import make_engine
from flockstep.records.events import EvaluationEvent
from flockstep.sealed import archive
from support import sealed_jobs
from support.sealed_data import write_data
from support.sealed_jobs import JOBS


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the sender's (`model.sealed.names`) and the customer's (`private_place`, `run`)."""
    folder = tmp_path_factory.mktemp("returned")
    job = JOBS["gpt"]()
    file = flockstep.seal(job, out=folder / "model.sealed", rename=True)
    data = write_data(folder / "private_place", job.data())
    flockstep.simulate(str(file), "all_reduce", workers=2, steps=6, data=str(data), trust="anyone", out=folder / "run")
    return folder


def test_the_sender_gets_the_weights_under_the_own_names_and_the_record(trained: Path, tmp_path: Path) -> None:
    out = flockstep.unseal(trained / "run", tmp_path / "mine", names=trained / "model.sealed.names")
    weights = load_file(out / "model.safetensors")
    module = make_engine(JOBS["gpt"](), 0).module  # type: ignore[attr-defined]
    assert set(weights) == {name for name, _ in module.named_parameters()}
    params, schema = RunResult.read(trained / "run").parameters()
    assert np.array_equal(np.concatenate([weights[name].ravel() for name in weights_in_order(trained)]), params)
    assert len(schema.entries) == len(weights)
    record = RunResult.read(out)
    assert record.summary.final_metric == RunResult.read(trained / "run").summary.final_metric
    assert len([one for one in record.events() if type(one).__name__ == "StepEvent"]) == 12


@pytest.mark.parametrize("strategy", ["gossip", "ensemble"])
def test_buffers_go_back_with_which_the_sender_evaluates_as_the_run_did(strategy: str, tmp_path: Path) -> None:
    job = JOBS["normed"]()
    file = flockstep.seal(job, out=tmp_path / "model.sealed", rename=True)
    data = write_data(tmp_path / "data", job.data())
    found = flockstep.simulate(
        str(file), strategy, workers=2, steps=6, data=str(data), trust="anyone", out=tmp_path / "run"
    )
    out = flockstep.unseal(tmp_path / "run", tmp_path / "mine", names=tmp_path / "model.sealed.names")
    state = {name: torch.from_numpy(value) for name, value in load_file(out / "model.safetensors").items()}
    assert state["1.running_mean"].shape[:-1] == ((2,) if strategy == "ensemble" else ())
    members = [{name: one[r] for name, one in state.items()} for r in range(2)] if strategy == "ensemble" else [state]
    chances = torch.zeros(())
    for member in members:
        module = sealed_jobs.normed_network().eval()
        module.load_state_dict(member)
        with torch.no_grad():
            chances = chances + module(torch.from_numpy(job.data().test_x)).softmax(-1) / len(members)
    loss = F.nll_loss(chances.log(), torch.from_numpy(job.data().test_y))
    assert float(loss) == pytest.approx(last_loss(found), rel=1e-5)


def last_loss(run: RunResult) -> float:
    return next(one.loss for one in reversed(run.events()) if isinstance(one, EvaluationEvent))


def weights_in_order(trained: Path) -> list[str]:
    names = msgspec.json.decode((trained / "model.sealed.names").read_bytes())
    _, schema = RunResult.read(trained / "run").parameters()
    return [names[entry.name] for entry in schema.entries]


def test_what_goes_back_is_listed_and_holds_no_path_of_the_customers(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert b"private_place" in (trained / "run" / "config.toml").read_bytes()
    assert run(["return", str(trained / "run"), "--out", str(tmp_path / "back")]) == 0
    told = capsys.readouterr().out
    assert "the loss of each worker's batch at 12 steps" in told
    assert "fingerprints of the data, such as of names, sizes and samples of its files: data " in told
    data = (tmp_path / "back").read_bytes()
    assert b"private_place" not in data
    assert str(trained).encode() not in data
    assert run(["unseal", str(tmp_path / "back"), "--out", str(tmp_path / "mine")]) == 0
    assert "p0" in load_file(tmp_path / "mine" / "model.safetensors")


def test_settings_that_may_name_files_do_not_go_back(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "run", tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    text, changed = re.subn(r'(?m)^compute = ".*"$', "compute = \"record('/another_place/a')\"", config.read_text())
    assert changed == 1
    config.write_text(text)
    assert run(["return", str(tmp_path / "run"), "--out", str(tmp_path / "back")]) == 0
    assert b"another_place" not in (tmp_path / "back").read_bytes()
    flockstep.run("softmax", "all_reduce", workers=1, steps=2, out=tmp_path / "own")
    with pytest.raises(ConfigurationError, match="a run of softmax, which is no sealed job"):
        flockstep.unseal(tmp_path / "own", tmp_path / "mine")


def test_results_that_are_damaged_or_have_a_place_already_are_refused(trained: Path, tmp_path: Path) -> None:
    assert run(["return", str(trained / "run"), "--out", str(tmp_path / "back")]) == 0
    sections = archive.read(
        tmp_path / "back", ("config.toml", "summary.json", "events.jsonl", "model.safetensors"), "anyone"
    )
    for name, value in (
        ("summary.json", b"{}"),
        ("events.jsonl", b"[]\n"),
        ("model.safetensors", b"x"),
        ("config.toml", b"="),
    ):
        archive.write(tmp_path / "bad", sections | {name: value})
        with pytest.raises(ConfigurationError, match=r"returned run|TOML"):
            flockstep.unseal(tmp_path / "bad", tmp_path / "mine")
        assert not (tmp_path / "mine").exists()
    archive.write(tmp_path / "bad", {name: value for name, value in sections.items() if name != "summary.json"})
    with pytest.raises(ConfigurationError, match=r"the returned run lacks summary\.json"):
        flockstep.unseal(tmp_path / "bad", tmp_path / "mine")
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigurationError, match="exists; choose another folder"):
        flockstep.unseal(tmp_path / "back", tmp_path / "mine")
    (tmp_path / "own.pub").write_text("ab" * 64)
    with pytest.raises(ConfigurationError, match="must be signed by a key that you trust"):
        flockstep.unseal(tmp_path / "back", tmp_path / "other", trust=tmp_path / "own.pub")


def test_names_of_another_job_and_files_of_another_kind_are_refused(trained: Path, tmp_path: Path) -> None:
    other = flockstep.seal(JOBS["cnn"](), out=tmp_path / "other.sealed", rename=True)
    with pytest.raises(ConfigurationError, match="the names must be those of the job that was trained"):
        flockstep.unseal(trained / "run", tmp_path / "mine", names=tmp_path / "other.sealed.names")
    with pytest.raises(
        ConfigurationError, match=r"must hold config.toml, .* got manifest, tensors; .* unseal takes one"
    ):
        flockstep.unseal(other, tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_files_are_not_overwritten_unless_told(trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.sealed"
    file.write_text("kept")
    with pytest.raises(ConfigurationError, match=r"model.sealed exists; .* with --overwrite"):
        flockstep.seal(JOBS["cnn"](), out=file)
    assert file.read_text() == "kept"
    flockstep.seal(JOBS["cnn"](), out=file, overwrite=True)
    given = ["return", str(trained / "run"), "--out", str(file)]
    before = file.read_bytes()
    assert run(given) == 2
    assert file.read_bytes() == before
    assert run([*given, "--overwrite"]) == 0
    assert file.read_bytes() != before
