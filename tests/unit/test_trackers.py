"""`flockstep track`: the curves of a run in each experiment tracker, read back with the tracker's own library."""

import json
import math
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest

import flockstep
from flockstep.errors import ConfigurationError, MissingDependency, UnknownName
from flockstep.records.events import EvaluationEvent, StepEvent
from flockstep.records.folder import RunFolder
from flockstep.trackers.base import ExperimentTracker

NAME = "a-run"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run in virtual time."""
    folder = tmp_path_factory.mktemp("runs") / NAME
    flockstep.simulate("quadratic", "gossip", workers=2, steps=6, evaluate_every=2, out=folder)
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def expected(run) -> dict[str, list[tuple[int, float]]]:
    """Name of a curve → step and value of its points, for the curves of losses."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for event in RunFolder(run).read_events():
        if isinstance(event, StepEvent) and event.loss is not None:
            curves.setdefault(f"worker-{event.rank}/loss", []).append((event.step, event.loss))
        if isinstance(event, EvaluationEvent):
            curves.setdefault("evaluation/loss", []).append((round(event.step), event.loss))
    assert sorted(curves) == ["evaluation/loss", "worker-0/loss", "worker-1/loss"]
    assert [len(points) for points in curves.values()].count(6) == 2
    return curves


def assert_same(found: dict[str, list[tuple[int, float]]], run) -> None:
    for name, points in expected(run).items():
        assert [step for step, _ in found[name]] == [step for step, _ in points], name
        assert all(
            math.isclose(got, value, rel_tol=1e-6) for (_, got), (_, value) in zip(found[name], points, strict=True)
        ), name


def test_the_place_of_tensorboard_names_the_command_that_shows_it():
    expected = "the folder my curves; tensorboard --logdir 'my curves' shows the curves"
    assert ExperimentTracker.parse("tensorboard(folder='my curves')").place == expected


def test_tensorboard(run, here):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    assert flockstep.track(run, "tensorboard") >= 12
    read = EventAccumulator(str(here / "tensorboard" / NAME))
    read.Reload()
    curves = {
        tag: [(point.step, float(tensor_util.make_ndarray(point.tensor_proto))) for point in read.Tensors(tag)]
        for tag in read.Tags()["tensors"]
    }
    assert_same(curves, run)
    with pytest.raises(ConfigurationError, match="a-run holds the curves of another run; remove the folder"):
        flockstep.track(run, "tensorboard")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's own use of SQLAlchemy
def test_mlflow(run, here):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    uri = f"sqlite:///{here}/mlflow.db"
    flockstep.track(run, f"mlflow(uri={uri!r}, experiment=one)")
    client = mlflow.MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name("one").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["strategy"] == "gossip"
    curves = {
        name: [(one.step, one.value) for one in client.get_metric_history(found.info.run_id, name)]
        for name in expected(run)
    }
    assert_same(curves, run)


def test_wandb_keeps_an_offline_run(run, here):
    pytest.importorskip("wandb", reason="wandb is not installed")
    from wandb.proto import wandb_internal_pb2

    program = f"import flockstep; flockstep.track({str(run)!r}, 'wandb')"
    subprocess.run([sys.executable, "-c", program], check=True)  # wandb starts a process that ends with this one
    (file,) = here.rglob("*.wandb")
    curves: dict[str, list[tuple[int, float]]] = {}
    for data in log_records(file.read_bytes()):
        entry = wandb_internal_pb2.Record()
        entry.ParseFromString(data)
        row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in entry.history.item}
        for name in set(row) & set(expected(run)):
            curves.setdefault(name, []).append((row[f"{name.partition('/')[0]}/step"], row[name]))
    assert_same(curves, run)


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format: blocks of 32 KiB of fragments (checksum, length, type), after a header
    of 7 bytes.
    """
    place, record = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last fragment of one
            yield record
            record = b""


def test_trackio(run, here):
    pytest.importorskip("trackio", reason="trackio is not installed")
    program = f"""
import json, flockstep
from trackio.sqlite_storage import SQLiteStorage
flockstep.track({str(run)!r}, "trackio(project=one)")
with open("logs.json", "w") as file:
    json.dump(SQLiteStorage.get_logs("one", {NAME!r}), file)
"""
    env = {"TRACKIO_DIR": str(here), "HOME": str(here), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", program], check=True, env=env)
    rows = json.loads((here / "logs.json").read_text())
    curves = {name: [(row["step"], row[name]) for row in rows if name in row] for name in expected(run)}
    assert_same(curves, run)


def test_a_tracker_that_is_not_installed_is_named_with_its_installation(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(sys, "meta_path", [_Without("wandb"), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "wandb")
    with pytest.raises(MissingDependency, match="install the package with: pip install wandb"):
        flockstep.track(run, "wandb")


class _Without:
    def __init__(self, name: str):
        self.name = name

    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return


def test_an_unknown_tracker_and_a_folder_without_a_run_are_refused(run, tmp_path):
    with pytest.raises(UnknownName, match="did you mean 'tensorboard'"):
        flockstep.track(run, "tensorbord")
    with pytest.raises(ConfigurationError, match="contains no run"):
        flockstep.track(tmp_path, "tensorboard")
