"""Job files and engines: what a user's file may do wrong ends in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flockstep.cli.app import run
from flockstep.errors import ConfigurationError, MissingDependency, UnknownName
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.job import load_job_file, make_engine
from flockstep.frameworks.numpy import NumpyEngine, SoftmaxRegression
from support.processes import PATIENCE

GOOD = """
    from dataclasses import dataclass
    import numpy as np
    from flockstep.frameworks.base import Data, Job
    from flockstep.frameworks.numpy import SoftmaxRegression

    @dataclass
    class Sizes:
        features: int = 3

    def data():
        x, y = np.eye(3), np.arange(3)
        return Data(x, y, x, y)

    def job():
        return Job(lambda: SoftmaxRegression(Sizes().features, 3), data, "sgd(lr=0.1)", name="mine")
"""


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def write(folder: Path, text: str, name: str = "example.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def model_job(model: Any, **changes: Any) -> Job:
    x, y = np.eye(3), np.arange(3)
    return Job(model, lambda: Data(x, y, x, y), "sgd(lr=0.1)", **changes)


def test_a_good_file_gives_its_job_and_an_engine(tmp_path: Path) -> None:
    job = load_job_file(write(tmp_path, GOOD))
    assert job.name == "mine"
    engine = make_engine(job, seed=1)
    assert isinstance(engine, NumpyEngine)
    assert engine.schema.size == 12


def test_a_file_may_import_its_neighbor(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "job_file_neighbor.py")
    try:
        assert load_job_file(str(write(tmp_path, "from job_file_neighbor import job"))).name == "mine"
    finally:
        sys.modules.pop("job_file_neighbor", None)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = 1", r"job file '.*example\.py' has no function job\(\); add one that returns a flockstep\.Job; to run a"),
        ("x = 1", r"to run a training script on workers, write flockstep launch .*example\.py$"),
        ("job = 3", r"has no function job\(\)"),
        (
            "def job(): return 3",
            r"job\(\) of job file '.*' must return a flockstep\.Job, got int; end it with return flockstep\.Job",
        ),
        ("def job(): pass", "got NoneType"),
        (
            "\ndef job():\n    return 1 / 0",
            r"job\(\) raised ZeroDivisionError: division by zero at line 3; fix the file$",
        ),
        ("def job(n): pass", r"raised TypeError: .*missing 1 required positional argument"),
        (
            "job = 1\n\nraise ValueError('broken\\nfile')",
            "importing it raised ValueError: broken at line 3; fix the file",
        ),
        ("def job(:", "importing it raised SyntaxError: .* at line 1"),
        ("job = 1; import sys; sys.exit(3)", "importing it raised SystemExit: 3 at line 1"),
        ("from no_such_module_here import job", "ModuleNotFoundError: No module named 'no_such_module_here'"),
    ],
)
def test_a_bad_file_ends_in_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        load_job_file(write(tmp_path, text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("command", ["train", "simulate", "plan"])
def test_a_training_script_is_refused_before_it_runs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = write(tmp_path, "import pathlib\npathlib.Path('ran').touch()\nmodel, jobs = 1, 'my job'\n", "train me.py")
    assert run([command, script.name, *(["-s", "gossip"] if command != "plan" else [])]) == 2
    assert "to run a training script on workers, write flockstep launch 'train me.py'" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "text",
    [
        "import job_file_others as others\njob = others.job",
        "from job_file_others import *",
        "globals()['job'] = __import__('job_file_others').job",
        "if True:\n    from job_file_others import job",
        "exec('from job_file_others import job')",
        "globals().update({'jo' + 'b': __import__('job_file_others').job})",
        "import job_file_others\ndef __getattr__(name): return getattr(job_file_others, name)",
        "import job_file_others\nmatch [job_file_others.job]:\n    case [job]: pass",
    ],
)
def test_a_job_may_be_defined_in_any_way(tmp_path: Path, text: str) -> None:
    write(tmp_path, GOOD, "job_file_others.py")
    try:
        assert load_job_file(str(write(tmp_path, text))).name == "mine"
    finally:
        sys.modules.pop("job_file_others", None)


def test_errors_of_ours_inside_the_file_stay_what_they_are(tmp_path: Path) -> None:
    text = GOOD.replace("return Job(", "return Job(batch=0, model=")
    with pytest.raises(ConfigurationError, match=r"^batch must be >= 1, got 0; 32 is usual$"):
        load_job_file(write(tmp_path, text.replace("data, ", "data=data, ").replace('"sgd', 'optimizer="sgd')))


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"there is no job file '.*nothing\.py'; check the path"):
        load_job_file(tmp_path / "nothing.py")
    with pytest.raises(ConfigurationError, match=r"must be a Python file, got '.*job\.txt'"):
        load_job_file(tmp_path / "job.txt")
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(ConfigurationError, match="there is no job file"):
        load_job_file(tmp_path / "folder.py")


def test_a_model_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigurationError, match=r"of job 'odd' must be a torch\.nn\.Module, .*, got builtins\.dict; let"
    ):
        make_engine(model_job(dict, name="odd"), seed=0)


def test_a_model_that_cannot_be_built() -> None:
    def model() -> Any:
        raise KeyError("width")

    with pytest.raises(ConfigurationError, match=r"the job 'job' failed: model\(\) raised KeyError: 'width'"):
        make_engine(model_job(model), seed=0)
    with pytest.raises(UnknownName, match="no optimizer is called 'sdg'; did you mean 'sgd'"):
        make_engine(Job(lambda: SoftmaxRegression(3, 3), model_job(None).data, "sdg"), seed=0)


def test_without_torch_the_way_to_install_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)

    def model() -> Any:
        import torch

        return torch.nn.Linear(2, 2)

    with pytest.raises(MissingDependency, match=r"the job 'job' needs torch, .*pip install 'flockstep\[torch\]'"):
        make_engine(model_job(model), seed=0)
    with pytest.raises(MissingDependency, match="needs torch, which is not installed"):
        load_job_file(write(tmp_path, "from torch import job"))
    assert isinstance(make_engine(model_job(lambda: SoftmaxRegression(3, 3)), seed=0), NumpyEngine)


def test_a_torch_module_gets_a_torch_engine_and_leaves_random_numbers_alone() -> None:
    torch = pytest.importorskip("torch")
    before = torch.get_rng_state()
    job = model_job(lambda: torch.nn.Linear(3, 3), loss=torch.nn.functional.cross_entropy)
    engine = make_engine(job, seed=1)
    assert type(engine).__name__ == "TorchEngine"
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(engine.initial(), make_engine(job, seed=1).initial())


def test_numpy_jobs_do_not_import_torch(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    code = (
        "import sys; from flockstep.frameworks.job import load_job_file, make_engine; "
        f"make_engine(load_job_file({str(path)!r}), 0); print('torch' in sys.modules, 'numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert done.stdout.split() == ["False", "False"]


def test_a_file_that_was_changed_within_a_second_is_read_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytecode of the same size and time would be taken for the file's."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    found = []
    for name in ("one", "two"):
        file = write(tmp_path, GOOD.replace("mine", name))
        os.utime(file, (1e9, 1e9))
        found.append(load_job_file(file).name)
    assert found == ["one", "two"]
    assert list(tmp_path.iterdir()) == [file], "no bytecode is left beside the user's file"
