"""`flockstep doctor`: what works is told as working, and what does not is told as failing."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from flockstep import doctor
from flockstep.cli.app import run
from flockstep.doctor import Diagnosis, SelfTest, examine, usual
from support.matrix import few
from support.processes import PATIENCE

NO_TCP = """
from flockstep.links.kinds import Tcp


def listen(self, directory, name):
    raise OSError("no loopback here")


Tcp.listen = listen
"""
"""As `sitecustomize`, it breaks the transport in every process."""


def outcomes(*tests: SelfTest, limit: float = PATIENCE) -> dict[str, tuple[str, str]]:
    return {one.name: (one.status, one.detail) for one in examine(tests, limit=limit).tried}


def python(name: str, code: str, **more: object) -> SelfTest:
    return SelfTest(name, "core", ("-c", code), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", few(["ipc", "shared_memory"], "ipc"))  # the other compiles its sums anew
def test_a_transport_that_fails_is_told_and_the_others_work(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_TCP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = outcomes(*(one for one in usual() if one.name in ("virtual time", transport, "tcp")))
    assert found["virtual time"] == ("works", "2 simulated workers, 3 steps")
    assert found[transport] == ("works", "2 processes, 3 steps, with the same result as the simulation")
    status, detail = found["tcp"]
    assert status == "fails"
    assert "no loopback here" in detail


def test_what_fails_says_why() -> None:
    found = outcomes(
        python("good", "print('fine')"),
        python("bad", "import sys; print('noise', file=sys.stderr); sys.exit('flockstep: no room\\n-----')"),
        python("silent", "import sys; sys.exit(3)"),
        python("absent", "print('never run')", module="flockstep_absent"),
        python("needy", "print('never run')", needs=("good", "bad")),
    )
    assert found == {
        "good": ("works", "fine"),
        "bad": ("fails", "no room"),
        "silent": ("fails", "ended with exit code 3"),
        "absent": ("missing", "not installed"),
        "needy": ("missing", "needs bad"),
    }


def test_launchers_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    launchers = {one.name: one for one in usual() if one.group == "launchers"}
    assert set(launchers) == {"torchrun", "mpirun", "srun", "sbatch", "ssh", "ray", "spark"}
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    tried = [one for name, one in launchers.items() if name in ("mpirun", "ssh")]
    for one, (status, detail) in outcomes(*tried).items():
        known = shutil.which(one, path=doctor.SEARCHED)
        said = {"mpirun": "2 processes know their ranks", "ssh": "can read its configuration; hosts are tried later"}[
            one
        ]
        assert (status, detail[:20]) == (("works", said[:20]) if known else ("missing", "not installed"))
    absent = SelfTest("absent", "launchers", (), program="flockstep-absent")
    assert outcomes(absent) == {"absent": ("missing", "not installed")}


def test_processes_that_do_not_know_their_ranks_fail() -> None:
    judge = next(one.judge for one in usual() if one.name == "mpirun")
    assert judge("Place(rank=1, workers=2, …\nPlace(rank=0, workers=2, …\n") == "2 processes know their ranks"
    for said in ("None\nNone\n", "Place(rank=0, workers=2\nPlace(rank=0, workers=2", "Place(rank=0, workers=3"):
        with pytest.raises(ValueError, match="not 0 and 1"):
            judge(said)


def test_what_hangs_is_ended() -> None:
    assert outcomes(python("hung", "import threading; threading.Event().wait()"), limit=0.5) == {
        "hung": ("fails", "did not end within 0.5 s")
    }


LEAVING = """
import subprocess, tempfile
tempfile.mkdtemp(prefix="flockstep-")
subprocess.Popen(["sh", "-c", "(sleep 100; echo late) > {0}"])
"""
"""A test that ends before a process of its own, which holds its output, and that leaves a folder."""


def test_what_a_test_leaves_behind_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, fifo = tmp_path / "temporary", tmp_path / "said"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", None)
    os.mkfifo(fifo)
    with os.fdopen(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK), "rb") as said:
        found = outcomes(python("left", LEAVING.format(fifo)), limit=2.0)
        os.set_blocking(said.fileno(), True)
        assert said.read() == b""  # read to the end, which comes when no process can write any more
    assert found == {"left": ("fails", "did not end within 2 s")}
    assert list(place.iterdir()) == []


def test_a_run_with_other_bits_than_its_simulation_fails() -> None:
    judges = {one.name: one.judge for one in usual()}
    judges["virtual time"](json.dumps({"status": "finished", "result_hash": "a"}))
    assert "the same result" in judges["ipc"](json.dumps({"status": "finished", "result_hash": "a"}))
    with pytest.raises(ValueError, match="different parameters"):
        judges["ipc"](json.dumps({"status": "finished", "result_hash": "b"}))
    with pytest.raises(ValueError, match="diverged"):
        judges["ipc"](json.dumps({"status": "diverged", "result_hash": "a"}))


def test_every_transport_and_every_extra_is_tried() -> None:
    import tomllib

    from flockstep import registry

    names = {one.name for one in usual()}
    assert set(registry.names("transport")) - {"namespaces"} <= names  # of flockstep-lab
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert set(project["optional-dependencies"]) <= names
    packages = {one.partition(">")[0].replace("_", "-") for one in project["dependencies"]}
    assert packages <= names


@pytest.mark.parametrize(("code", "exit_code", "end"), [("", 0, "The core works."), ("1/0", 1, "does not work here")])
def test_the_exit_code_is_that_of_the_core(
    code: str, exit_code: int, end: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = SelfTest("extra", "extras", ("-c", "1/0"), fix="install more")
    monkeypatch.setattr(doctor, "usual", lambda: [python("base", code, core=True, fix="mend it"), broken])
    assert run(["doctor", "--full"]) == exit_code
    out = capsys.readouterr().out
    assert end in out
    assert "  - extra: install more" in out
    assert ("  - base: mend it" in out) == bool(exit_code)
    assert run(["doctor", "--full", "--json"]) == exit_code
    document = json.loads(capsys.readouterr().out)
    assert document["works"] == (exit_code == 0)
    assert [one["status"] for one in document["tried"]] == ["fails" if exit_code else "works", "fails"]
    assert {"flockstep", "Python", "platform"} <= set(document["facts"])


@pytest.mark.parametrize("core", [False, True])
def test_what_was_tried_before_an_interruption_is_shown(
    core: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(output: str) -> str:
        raise KeyboardInterrupt

    late = SelfTest("late", "extras", ("-c", "1/0"), core=core)
    tests = [python("base", "print('fine')", core=True), SelfTest("slow", "extras", ("-c", ""), judge=stop), late]
    monkeypatch.setattr(doctor, "usual", lambda: tests)
    assert run(["doctor", "--full"]) == 130
    out, err = capsys.readouterr()
    assert "works    base  fine" in out
    assert "not tried: slow, late" in out
    assert ("The core works." in out) == (not core)
    assert err.endswith("flockstep: interrupted; 1 of 3 parts were tried\n")
    assert run(["doctor", "--full", "--json"]) == 130
    document = json.loads(capsys.readouterr().out)
    assert (document["works"], document["untried"]) == (not core, ["slow", "late"])


def test_only_the_core_is_tried_without_full_and_the_others_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, absent = (SelfTest(name, "extras", ("-c", "1/0"), fix="get it", module=name) for name in ("json", "no_json"))
    monkeypatch.setattr(doctor, "usual", lambda: [python("base", "", core=True), here, absent])
    assert run(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "not tried: json (flockstep doctor --full tries all parts)\n\nThe core works." in out
    assert "  missing  no_json  not installed" in out
    assert "  - no_json: get it" in out


def test_nothing_tried_is_a_core_that_works() -> None:
    assert Diagnosis({}, ()).works
