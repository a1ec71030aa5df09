"""What is kept of trials: when it may be taken up again, and what is said where it may not."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from flockstep.cli.app import run as run_command
from flockstep.costs.cluster_file import load_cluster
from flockstep.errors import ConfigurationError
from flockstep.frameworks.base import Data
from flockstep.planning.job_profile import Site, task_of
from flockstep.planning.trial_store import FILE, TrialStore, digest, trial_settings
from flockstep.planning.trials import Trial, TrialContext

TARGET = 0.9


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("ROTATED = 0", "ROTATED = 1", "job's data must be"),
        ("least_steps=3", "least_steps=4", "least_steps must be 3"),
        ("epochs=2.0", "epochs=3.0", "epochs must be 2.0"),
        ("higher_is_better=False", "higher_is_better=True", "higher_is_better must be False"),
        ("# nothing", "# another word", "job's file must be"),
    ],
)
def test_trials_of_a_job_that_was_changed_are_not_taken_up(old: str, new: str, rule: str, tmp_path: Path) -> None:
    def settings(text: str) -> dict[str, object]:
        (tmp_path / "kept_job.py").write_text(text)
        sys.modules.pop("flockstep_job_kept_job", None)
        site = Site(task_of(str(tmp_path / "kept_job.py")), load_cluster("lab-1gbit"))
        return trial_settings(TrialContext(site), 4, TARGET, 0, "iid")

    before = settings(JOB_FILE)
    assert settings(JOB_FILE) == before
    TrialStore(before, tmp_path / "kept")
    after = settings(JOB_FILE.replace(old, new))
    if old != "# nothing":
        assert after["job's file"] != before["job's file"]
        after["job's file"] = before["job's file"]  # what a job reads may change where its file does not
    with pytest.raises(ConfigurationError, match=f"{rule}.*, as in the trials stored in .*; give another folder"):
        TrialStore(after, tmp_path / "kept")


JOB_FILE = """
import numpy as np
from flockstep.frameworks.base import Data, Job
from flockstep.testing.strategies import small_job

ROTATED = 0  # labels
# nothing

def job():
    small = small_job()
    data = small.data()
    rotated = Data(data.train_x, np.roll(data.train_y, ROTATED), data.test_x, data.test_y)
    return Job(
        model=small.model, data=lambda: rotated, optimizer="sgd(lr=0.1)", loss=small.loss, epochs=2.0, least_steps=3,
        higher_is_better=False,
    )
"""


def test_digests_are_of_types_shapes_and_contents() -> None:
    torch = pytest.importorskip("torch")
    x, y = np.arange(6.0), np.arange(6)
    same = [Data(x, y, x, y), Data(x.copy(), y[::-1][::-1], x, y)]
    other = [
        Data(x, y[::-1], x, y),
        Data(x, y, x, y[::-1]),
        Data(x.astype(np.float32), y, x, y),
        Data(x.reshape(6, 1), y, x, y),
        Data(x, np.array(["a"] * 6, dtype=object), x, y),
        Data(torch.from_numpy(x), y, x, y),
        Data(torch.from_numpy(x).to(torch.bfloat16), y, x, y),
    ]
    assert len({digest(data) for data in same}) == 1
    assert len({digest(data) for data in (same[0], *other)}) == 1 + len(other)


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe\x00binary\n",
        b"[" * 100_000 + b"\n",
        b'{"settings": {}}\n' + b"[" * 100_000 + b"]" * 100_000 + b"\n",
        b'{"settings": {}}\n{"trial": {}, "within": null, "lr": 1}\n',
        b"\n",
        b"",
    ],
)
def test_what_holds_no_trials_is_refused_in_a_sentence(text: bytes, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(text)
    with pytest.raises(ConfigurationError, match="must hold saved trials, got something else; give another folder"):
        TrialStore({}, tmp_path)


def test_a_trial_that_was_given_no_number_of_seconds_is_refused(tmp_path: Path) -> None:
    kept = TrialStore({}, tmp_path)
    one = Trial("all_reduce", 4, 0.1, 0, TARGET, "time", None, 5.0, 10, 100, None, None)
    kept.add(one, 0.1, 5.0)
    assert TrialStore({}, tmp_path).find("all_reduce", 0.1, 0, 5.0) == one
    text = (tmp_path / FILE).read_text()
    for old, new in (('"within": 5.0', '"within": "soon"'), ('"lr": 0.1}', '"lr": [1]}')):
        assert old in text
        (tmp_path / FILE).write_text(text.replace(old, new))
        with pytest.raises(ConfigurationError, match="must hold saved trials"):
            TrialStore({}, tmp_path)


def test_trials_cannot_be_kept_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "below"):
        with pytest.raises(ConfigurationError, match=r"cannot save trials in .*; name another folder with --keep"):
            TrialStore({}, folder)


@pytest.mark.parametrize("where", ["job", "engine"])
def test_interrupted_before_the_first_trial_there_is_still_a_plan(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TrialContext, where, interrupt)
    words = ["plan", "softmax", "-c", "lab-1gbit", "-n", "4", "-s", "all_reduce", "--simulate"]
    assert run_command([*words, "--keep", str(tmp_path / "kept")]) == 130
    out, err = capsys.readouterr()
    assert "why:" in out
    assert f"repeat the command with --keep {tmp_path / 'kept'} to continue" in err
    assert "Traceback" not in err
