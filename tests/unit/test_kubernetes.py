"""The manifest for Kubernetes: a schema that its client knows, and a command that runs in the pods' environment."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from flockstep.cli.app import run
from flockstep.errors import ConfigurationError
from flockstep.launchers.kubernetes import RESOLVE, Pods, manifest
from flockstep.runtime.place import SECRET
from support.pods import container_of, expanded, object_of

COMMAND = ["launch", "-n", "4", "train.py", "--rate", "0.1", "$(HOME)", "a $$ b$", 'say "no": #1', "true", "", "é"]
EVERYTHING = Pods("reg.example/me/train:1", 3, "digits", 4000, "500m", "8Gi", 1, "records")
ONLY_NODES = Pods("train", 2, secret="kept")
PODS = {"everything": EVERYTHING, "only nodes": ONLY_NODES}


@pytest.mark.parametrize("name", PODS)
def test_the_client_of_kubernetes_knows_every_field(name: str) -> None:
    kubernetes = pytest.importorskip("kubernetes", reason="the client of Kubernetes is not installed")
    client = kubernetes.client.ApiClient()
    for document in manifest(PODS[name], COMMAND)["items"]:
        kind = f"V1{document['kind']}"
        read = client.deserialize(json.dumps(document), kind, None)
        assert isinstance(read, getattr(kubernetes.client, kind))
        assert client.sanitize_for_serialization(read) == document, "a field that the client does not know is dropped"


def test_a_field_that_kubernetes_does_not_have_is_noticed() -> None:
    kubernetes = pytest.importorskip("kubernetes", reason="the client of Kubernetes is not installed")
    client = kubernetes.client.ApiClient()
    document = object_of(manifest(ONLY_NODES, COMMAND), "Job")
    document["spec"]["completion"] = 2
    assert client.sanitize_for_serialization(client.deserialize(json.dumps(document), "V1Job", None)) != document
    del document["spec"]["template"]
    with pytest.raises(ValueError, match="template"):
        client.deserialize(json.dumps(document), "V1Job", None)


def test_every_pod_runs_the_command_with_its_place() -> None:
    job = object_of(manifest(EVERYTHING, COMMAND), "Job")
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (3, 3)
    ours = container_of(manifest(EVERYTHING, COMMAND))
    words = [expanded(word, {"JOB_COMPLETION_INDEX": "2"}) for word in ours["command"] + ours["args"]]
    place = ["--nodes", "3", "--node-rank", "2", "--coordinator", "digits-0.digits:4000"]
    assert words == ["flockstep", "launch", *place, "--out", "/runs/digits", *COMMAND[1:]]
    assert job["spec"]["template"]["spec"]["subdomain"] == "digits", "the Service gives pods their names"


def test_the_secret_is_new_and_stands_in_the_secret_alone() -> None:
    first, second = (object_of(manifest(EVERYTHING, COMMAND), "Secret")["stringData"]["secret"] for _ in range(2))
    assert first != second
    assert re.fullmatch("[0-9a-f]{64}", first)
    objects = manifest(EVERYTHING, COMMAND)
    text = object_of(objects, "Secret")["stringData"]["secret"]
    assert json.dumps(objects).count(text) == 1
    (variable,) = container_of(objects)["env"]
    assert variable == {"name": SECRET, "valueFrom": {"secretKeyRef": {"name": "digits", "key": "secret"}}}
    kept = manifest(ONLY_NODES, COMMAND)
    assert [one["kind"] for one in kept["items"]] == ["Service", "Job"]
    assert container_of(kept)["env"][0]["valueFrom"]["secretKeyRef"]["name"] == "kept"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"image": ""}, "--image must name a container image"),
        ({"nodes": 1}, "--nodes must be >= 2, got 1"),
        ({"port": 0}, "--port must be"),
        ({"gpus": -1}, "--gpus must be >= 0, got -1"),
        ({"name": "Digits"}, "--name must be 1 to 61 lower-case"),
        ({"name": "a" * 62}, "--name must be 1 to 61"),
        ({"claim": "-runs"}, "--claim must be"),
        ({"secret": "a_b"}, "--secret must be"),
        ({"cpu": "four"}, "--cpu must be a quantity"),
        ({"memory": "8 GB"}, "--memory must be a quantity"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_here(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        Pods(**{"image": "train", "nodes": 2, **change})


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["simulate", "digits", "-s", "bsp"], "got 'simulate'"),
        (["launch", "--node-rank", "1", "train.py"], "--node-rank gets its value in each pod from the manifest"),
        (["launch", "--nodes=2", "train.py"], "--nodes gets its value in each pod from the manifest"),
        (["launch", "-n", "1", "train.py"], "2 pods needs at least 2 workers, got 1"),
        (["train", "digits", "-s", "bsp", "--wrong"], "no option of flockstep train is called '--wrong'"),
        (["train", "digits"], "strategy"),
    ],
)
def test_a_command_that_would_fail_in_every_pod_is_refused(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["manifest", "--image", "train", *words]) == 2
    out, err = capsys.readouterr()
    assert why in err
    assert out == ""


def test_the_command_prints_the_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["manifest", "--image", "train", "--secret", "kept", "--json", *COMMAND[:4], "--nodes", "7"]
    assert run(words) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == manifest(ONLY_NODES, [*COMMAND[:4], "--nodes", "7"])
    assert run([word for word in words if word != "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == document


def test_pods_wait_until_the_name_of_pod_0_is_known() -> None:
    (wait,) = object_of(manifest(EVERYTHING, COMMAND), "Job")["spec"]["template"]["spec"]["initContainers"]
    assert wait["command"] == ["python3", "-c", RESOLVE, "digits-0.digits"]
    assert subprocess.run([sys.executable, "-c", RESOLVE, "localhost"], check=False).returncode == 0
    late = RESOLVE.replace("+ 300", "- 1")
    done = subprocess.run([sys.executable, "-c", late, "digits-0.invalid"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "cannot resolve digits-0.invalid" in done.stderr
