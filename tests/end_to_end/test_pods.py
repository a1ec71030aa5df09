"""The container's command of a manifest, run under the variables and names that Kubernetes gives its pods."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from flockstep.launchers.kubernetes import Pods, manifest
from support.jobs import undisturbed
from support.pods import container_of, expanded, object_of
from support.ports import free_port
from support.processes import RealRun

CAN = sys.platform == "linux" and os.geteuid() == 0 and shutil.which("unshare") is not None
pytestmark = pytest.mark.skipif(not CAN, reason="names of pods need a hosts file of their own: root and unshare")
STEPS = 5
JOB = ("softmax", "-s", "all_reduce(ring)", "-n", "4", "--steps", str(STEPS), "--seed", "1")


def test_two_pods_end_with_the_bits_of_one_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = manifest(Pods("train", 2, "digits", free_port()), ["train", *JOB, "--transport", "tcp(memory=true)"])
    container, secret = container_of(objects), object_of(objects, "Secret")["stringData"]
    names = tmp_path / "hosts"
    names.write_text("127.0.0.1 localhost digits-0.digits\n")
    within = ("unshare", "-m", "sh", "-c", f'mount --bind {names} /etc/hosts && exec "$@"', "sh")
    (variable,) = container["env"]
    monkeypatch.setenv(variable["name"], secret[variable["valueFrom"]["secretKeyRef"]["key"]])
    pods = []
    for index in (1, 0):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
        words = [expanded(word, dict(os.environ)) for word in container["command"] + container["args"]]
        assert words.pop(0) == "flockstep"
        pods.append(RealRun(words, tmp_path / f"pod-{index}", within=within))
    second, first = (pod.end() for pod in pods)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert first.summary is not None
    alone = undisturbed(tmp_path / "alone", "softmax", "all_reduce(ring)", 4, STEPS, seed=1)
    assert alone == first.summary["hashes"]
