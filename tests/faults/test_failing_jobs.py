"""The job itself fails in a worker: the sentence names the first cause, and the others end."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import numpy as np
import pytest

from flockstep.launchers import supervisor
from flockstep.launchers.supervisor import GRACE
from flockstep.records.folder import RunFolder
from flockstep.runtime.reports import PERIOD
from flockstep.runtime.setup import prepare
from support.matrix import few
from support.processes import PATIENCE, RealRun, wait_until

ENDLESS = ["-n", "3", "--steps", "1000000", "--evaluate-every", "10"]

JOB = """
import multiprocessing, os, sys, time
from flockstep.workloads.softmax import Softmax

HERE = os.path.dirname(__file__)

def first(name):
    '''Whether this process is the first worker to ask.'''
    if multiprocessing.parent_process() is None:
        return False
    try:
        os.close(os.open(os.path.join(HERE, name), os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False

def job():
    job = Softmax().job(0)
    plain = type(job.model()).gradients
    chosen, calls = first("chosen"), []

    class Faulty(type(job.model())):
        def gradients(self, *arguments):
            calls.append(1)
            until = time.monotonic() + 5 * {period}  # slow steps, of which the supervisor hears at their end
            while chosen and len(calls) in (39, 40) and time.monotonic() < until:
                pass
            if chosen and len(calls) == 40:
                misfortune()
            return plain(self, *arguments)

    def model():
        model = job.model()
        model.__class__ = Faulty
        return model

    return type(job)(model, job.data, job.optimizer, batch=4)

def misfortune():
    {misfortune}
"""


def failing(
    misfortune: str, folder: Path, *options: str, strategy: str = "all_reduce", grace: float = GRACE
) -> RealRun:
    (folder / "faulty.py").write_text(JOB.replace("{misfortune}", misfortune).replace("{period}", str(PERIOD)))
    arguments = ["train", str(folder / "faulty.py"), "-s", strategy, *ENDLESS, *options]
    return RealRun(arguments, folder / "run", before=f"import {supervisor.__name__} as s; s.GRACE = {grace}")


# The worker that fails has made 39 gradients; under asgd the two others may have made none by then.
@pytest.mark.parametrize(("strategy", "least"), few([("all_reduce", 38), ("asgd", 38 / 3)], ("all_reduce", 38)))
def test_an_error_in_the_job_is_named_with_its_worker_and_step(strategy: str, least: float, tmp_path: Path) -> None:
    ended = failing("raise OverflowError('too many cooks')", tmp_path, strategy=strategy).end()
    assert ended.code == 1
    said = r"worker \d at step 3\d raised OverflowError: too many cooks \(faulty.py, line \d+\)"
    pattern = rf"flockstep: ({said}); --debug shows the traceback\n"
    found = re.fullmatch(pattern, ended.err)
    assert found, ended.err
    assert ended.summary is not None
    assert ended.summary["status"] == "failed"
    assert found[1] in ended.summary["error"]
    assert ended.summary["lost"] == []
    assert ended.summary["best_metric"] is not None, "evaluations handed in before are kept"
    assert ended.summary["result_step"] >= least
    record = RunFolder(tmp_path / "run")
    assert not np.array_equal(record.read_result()[0], prepare(record.read_config())[0].initial())


@pytest.mark.full
def test_its_traceback_is_shown_on_request(tmp_path: Path) -> None:
    ended = failing("raise OverflowError('too many cooks')", tmp_path, "--debug").end()
    assert ended.code == 1
    assert "raise OverflowError('too many cooks')" in ended.err
    assert f'File "{tmp_path / "faulty.py"}"' in ended.err
    assert ended.err.splitlines()[-1].startswith("flockstep: worker ")


@pytest.mark.parametrize("code", few([0, 3], 0))
def test_a_process_that_just_exits_is_a_lost_worker(code: int, tmp_path: Path) -> None:
    ended = failing(f"os._exit({code})", tmp_path).end()
    assert ended.code == 1
    assert re.match(rf"flockstep: worker \d exited with code {code} at about step 38; ", ended.err)
    assert len(ended.err.splitlines()) == 1


@pytest.mark.full
def test_a_crash_in_native_code_is_a_lost_worker(tmp_path: Path) -> None:
    ended = failing("os.kill(os.getpid(), 11)", tmp_path).end()
    assert re.match(r"flockstep: worker \d was killed by SIGSEGV at about step 38; ", ended.err)


@pytest.mark.full
def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    ended = RealRun(["train", "quadratic", "-s", "asgd", *ENDLESS, "--lr", "50"], tmp_path / "run").end()
    assert ended.code == 1
    assert re.fullmatch(r"flockstep: the loss of worker \d is (inf|nan) at step \d+; lower .*\n", ended.err)
    assert ended.summary is not None
    assert ended.summary["status"] == "diverged"


OTHER_MODEL = """
from faulty import first
from flockstep.workloads.softmax import Softmax

def job():
    small = first("small")
    return Softmax(features=19 if small else 20).job(0)
"""


def test_workers_with_different_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(JOB)
    (tmp_path / "other.py").write_text(OTHER_MODEL)
    ended = RealRun(["train", str(tmp_path / "other.py"), "-s", "bsp", *ENDLESS], tmp_path / "run").end()
    assert (tmp_path / "small").exists()
    assert ended.code == 2
    pattern = (
        r"flockstep: the model of worker \d differs from the models of other workers: .* instead of .*; "
        r"build the same model on every worker\n"
    )
    assert re.fullmatch(pattern, ended.err), ended.err


IN_MODEL = """
from faulty import first
from flockstep.workloads.softmax import Softmax

def job():
    if first("broken"):
        raise LookupError("no such data here")
    return Softmax().job(0)
"""


def test_a_worker_that_cannot_even_build_its_job_is_named(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(JOB)
    (tmp_path / "other.py").write_text(IN_MODEL)
    ended = RealRun(["train", str(tmp_path / "other.py"), "-s", "bsp", *ENDLESS], tmp_path / "run").end()
    assert ended.code == 2
    assert "raised LookupError: no such data here" in ended.err
    assert len(ended.err.splitlines()) == 1


NOT_STOPPED = r"(; no checkpoint was taken at the end, because not all workers had stopped within [0-9.]+ s)?\n"
BUSY = "open(os.path.join(HERE, 'busy'), 'w').close()\n    while True: pass"


def test_a_second_interrupt_ends_at_once_what_does_not_react_to_the_first(tmp_path: Path) -> None:
    run = failing(BUSY, tmp_path, grace=3600.0)
    wait_until((tmp_path / "busy").exists, PATIENCE, "a worker is busy")
    run.fault(signal.SIGINT, "group")
    wait_until(lambda: len(run.working()) == 1, PATIENCE, "the two others have ended")
    assert run.going(), "it waits for the third"
    run.fault(signal.SIGINT, "group")
    ended = run.end()
    assert ended.code == 130
    assert re.fullmatch(f"flockstep: interrupted; everything computed so far is in the record{NOT_STOPPED}", ended.err)
    assert ended.summary is not None
    assert ended.summary["status"] == "interrupted"


def test_what_does_not_react_to_an_interrupt_is_killed(tmp_path: Path) -> None:
    run = failing(BUSY, tmp_path)
    wait_until((tmp_path / "busy").exists, PATIENCE, "a worker is busy")
    run.fault(signal.SIGTERM, "main")
    ended = run.end()
    assert ended.code == 130
    assert re.fullmatch(
        f"flockstep: stopped by SIGTERM; everything computed so far is in the record{NOT_STOPPED}", ended.err
    )
    assert ended.seconds < ended.limit
