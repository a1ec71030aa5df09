"""The wheel and the sdist: what is in them, and that a wheel works away from the repository."""

from __future__ import annotations

import email
import email.message
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling")

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "flockstep"
FILES = {
    str(path.relative_to(ROOT / "src"))
    for path in PACKAGE.rglob("*")
    if path.is_file() and path.parent.name != "__pycache__"
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("sdist", tmp_path_factory.mktemp("sdist"))


def built(kind: str, folder: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (file,) = folder.iterdir()
    return file


def described(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == FILES
    assert wheel.stat().st_size < 3_000_000


def test_the_sdist_has_what_it_takes_to_build_and_to_test(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in FILES} <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "Makefile"} <= names
    assert {"tests/unit/test_layers.py", "docs/generate.py", "examples/own_loop.py", "lab/pyproject.toml"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith(("runs/", ".venv/"))]


def test_the_metadata_is_whole(wheel: Path) -> None:
    said = described(wheel)
    assert said["Name"] == "flockstep"
    assert said["Version"] == PROJECT["version"]
    assert said["License-Expression"] == "Apache-2.0"
    assert said["License-File"] == "LICENSE"
    assert said["Description-Content-Type"] == "text/markdown"
    assert said.get_payload(decode=True) == (ROOT / "README.md").read_bytes()
    assert said["Summary"] == PROJECT["description"]
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {oldest}" in said.get_all("Classifier", [])
    assert {"fast", "torch", "workloads"} <= set(said.get_all("Provides-Extra", []))


@pytest.mark.full  # at every push: the wheel has every file
def test_an_installed_wheel_works_away_from_the_repository(wheel: Path, tmp_path: Path) -> None:
    """The packages that it needs are those of this environment; `make package` makes clean ones."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"}

    def python(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    home = python("-c", "import flockstep; print(flockstep.__file__)").strip()
    assert Path(home).is_relative_to(tmp_path / "site")
    assert "topologies" in python("-m", "flockstep", "list")
    words = ["softmax", "--simulate", "-n", "2", "--steps", "4", "-s", "all_reduce", "-s", "gossip", "--out", "c"]
    python("-m", "flockstep", "compare", *words)
    assert (tmp_path / "c" / "report.html").stat().st_size > 500_000
    assert "edge" in python("-m", "flockstep", "list", "clusters")
    assert "Petuum" in python("-m", "flockstep", "systems")
