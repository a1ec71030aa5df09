"""Sealed JAX jobs in processes that have nothing of the sender's: equal to the jobs themselves, without PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

import flockstep
from support.matrix import few
from support.sealed_data import write_data, write_job
from support.sealed_runs import TESTS, command, evaluations, trained

pytest.importorskip("jax")

from support.sealed_jax_jobs import JAX_JOBS

KINDS = [(kind, name) for kind in ("simulate", "train") for name in JAX_JOBS]
WITHOUT_TORCH = "import sys\n\nsys.modules['torch'] = None\n"
"""A file that a customer imports first: then PyTorch cannot be imported, as if it were not installed."""


@pytest.mark.parametrize(("kind", "name"), few(KINDS, ("simulate", "images"), ("train", "reader")))
def test_a_customer_trains_what_the_sender_would(kind: str, name: str, tmp_path: Path) -> None:
    sender, customer = tmp_path / "sender", tmp_path / "customer"
    sender.mkdir()
    customer.mkdir()
    job = JAX_JOBS[name]()
    flockstep.seal(job, out=customer / "model.sealed", rename=True)
    write_data(customer / "data", job.data())
    (customer / "without_torch.py").write_text(WITHOUT_TORCH)
    given = ["model.sealed", "--data", "data", "--trust", "anyone", "--import", "without_torch.py"]
    options = ["-s", "all_reduce", "-n", "2", "--steps", "8", *(["--transport", "ipc"] if kind == "train" else [])]
    theirs = trained(customer, "run", kind, *given, *options)
    file = write_job(sender, name, "sealed_jax_jobs")
    ours = trained(sender, "run", kind, str(file), *options, path=TESTS)
    assert ours.parameters()[0].tobytes() == theirs.parameters()[0].tobytes()
    assert [loss for loss, _ in evaluations(ours)] == [loss for loss, _ in evaluations(theirs)]
    found, right = ([metric for _, metric in evaluations(run)] for run in (theirs, ours))
    assert found == pytest.approx(right, rel=1e-5)
    done = command(customer, "return", "run", "--out", "run.returned")
    assert done.returncode == 0, done.stderr
    assert done.returncode == 0
    out = flockstep.unseal(customer / "run.returned", sender / "mine", names=customer / "model.sealed.names")
    assert "secret" in str((out / "model.safetensors").read_bytes()[:400])
