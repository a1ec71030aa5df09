"""Kubernetes: the manifest of a run whose hosts are the pods of one indexed Job.

The manifest is three objects: a Secret with the secret of the run, a headless Service that gives every pod a name, and
an indexed Job, each of whose pods runs the same `flockstep` command, with the pod's index. Pod 0 coordinates.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flockstep.errors import ConfigurationError, require
from flockstep.options import COORDINATOR_PORT, PodOptions
from flockstep.runtime.place import SECRET

LONGEST_NAME = 63
"""Largest number of characters of a name in DNS (RFC 1123); a pod's name is the Job's name, "-" and the index."""
INDEX = "JOB_COMPLETION_INDEX"
"""Environment variable in which the Job controller stores the index of a pod."""
KEY = "secret"
"""Key under which the secret of a run is stored in its Kubernetes Secret."""
RUNS = "/runs"
"""Folder in the pods where the volume of the records is mounted."""
RESOLVE = """import socket, sys, time
end = time.monotonic() + 300
while True:
    try:
        sys.exit(not socket.getaddrinfo(sys.argv[1], None))
    except OSError as error:
        if time.monotonic() > end:
            way_out = "check that pod 0 is running and that the cluster's DNS works"
            sys.exit(f"cannot resolve {sys.argv[1]}: {error}; {way_out}")
    time.sleep(0.5)"""
"""Program that waits until a name resolves; a cluster needs seconds to publish the name of a pod."""
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([numkMGTPE]|[KMGTPE]i)?")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
GROUP = 1000
"""Id of the group that may write to the volume of the records; every process of the pods is in this group."""
CONFINED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}

Object = dict[str, Any]
"""A Kubernetes object, such as a Job, as a dict."""


@dataclass(frozen=True)
class Pods(PodOptions):
    """The pods of a run.

    Raises:
        ConfigurationError: there are fewer than two pods, or Kubernetes would refuse a value.
    """

    def __post_init__(self) -> None:
        if not self.image or self.image != self.image.strip():
            raise ConfigurationError(
                f"--image must name a container image, got {self.image!r}; write REGISTRY/NAME:TAG"
            )
        require(self.nodes >= 2, "--nodes", ">= 2", self.nodes, "a run on one pod needs no manifest")
        require(0 < self.port < 1 << 16, "--port", ">= 1 and <= 65535", self.port, f"{COORDINATOR_PORT} is the default")
        require(self.gpus >= 0, "--gpus", ">= 0", self.gpus, "0 requests none")
        for option, name in (("--name", self.name), ("--claim", self.claim), ("--secret", self.secret)):
            longest = LONGEST_NAME - len(f"-{self.nodes - 1}") if option == "--name" else LONGEST_NAME
            if name is not None and not (_NAME.fullmatch(name) and len(name) <= longest):
                raise ConfigurationError(
                    f"{option} must be 1 to {longest} lower-case letters, digits and hyphens, without a hyphen at "
                    f"either end, got {name!r}; choose a name that Kubernetes accepts"
                )
        for option, amount in (("--cpu", self.cpu), ("--memory", self.memory)):
            if amount is not None and not _QUANTITY.fullmatch(amount):
                raise ConfigurationError(
                    f"{option} must be a quantity of Kubernetes, got {amount!r}; write it like 500m, 4 or 8Gi"
                )

    @property
    def first(self) -> str:
        """DNS name of pod 0 in the cluster."""
        return f"{self.name}-0.{self.name}"


def manifest(pods: Pods, command: Sequence[str]) -> Object:
    """Return a List of the objects of a run, for `kubectl apply`: a Secret unless one exists, a Service and a Job.

    Args:
        pods: the pods.
        command: the words of a `flockstep` command, such as ["launch", "-n", "4", "train.py"]; the options that give a
            pod its place are inserted after the first word.

    Raises:
        ConfigurationError: the command does not train.
    """
    require_trains(command)
    labels = {"app.kubernetes.io/name": "flockstep", "app.kubernetes.io/instance": pods.name}
    metadata = {"name": pods.name, "labels": labels}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "stringData": {KEY: secrets.token_hex(32)},
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # pods find each other before they are ready
            "selector": labels,
            "ports": [{"name": "coordinator", "port": pods.port}],
        },
    }
    place = ["--nodes", str(pods.nodes), "--node-rank", f"$({INDEX})", "--coordinator", f"{pods.first}:{pods.port}"]
    out = [] if pods.claim is None or "--out" in command else ["--out", f"{RUNS}/{pods.name}"]
    reference = {"name": pods.secret or pods.name, "key": KEY}
    container: Object = {
        "name": "flockstep",
        "image": pods.image,
        "command": ["flockstep", command[0]],
        "args": [*place, *out, *(word.replace("$", "$$") for word in command[1:])],
        "env": [{"name": SECRET, "valueFrom": {"secretKeyRef": reference}}],
        "ports": [{"name": "coordinator", "containerPort": pods.port}],
        "securityContext": CONFINED,
    }
    requests = {name: amount for name, amount in (("cpu", pods.cpu), ("memory", pods.memory)) if amount is not None}
    limits = {name: amount for name, amount in requests.items() if name == "memory"}
    if pods.gpus:
        limits["nvidia.com/gpu"] = str(pods.gpus)
    if requests or limits:
        amounts = (("requests", requests), ("limits", limits))
        container["resources"] = {name: amount for name, amount in amounts if amount}
    resolve = {
        "name": "resolve",
        "image": pods.image,
        "command": ["python3", "-c", RESOLVE, pods.first],
        "securityContext": CONFINED,
    }
    pod: Object = {
        "restartPolicy": "Never",
        "subdomain": pods.name,
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "enableServiceLinks": False,
        "initContainers": [resolve],
        "containers": [container],
    }
    if pods.claim is not None:
        container["volumeMounts"] = [{"name": "runs", "mountPath": RUNS}]
        pod["securityContext"]["fsGroup"] = GROUP  # without a group of the volume, only root can write to most volumes
        pod["volumes"] = [{"name": "runs", "persistentVolumeClaim": {"claimName": pods.claim}}]
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {  # a failed pod does not end the others, and the run is over when pod 0, the coordinator, is
            "completionMode": "Indexed",
            "completions": pods.nodes,
            "parallelism": pods.nodes,
            "backoffLimitPerIndex": 0,
            "maxFailedIndexes": pods.nodes - 1,
            "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    return {"apiVersion": "v1", "kind": "List", "items": [*([secret] if pods.secret is None else []), service, job]}


def require_trains(command: Sequence[str]) -> None:
    """Raise `ConfigurationError` unless the command is one that may run on several hosts."""
    if not command or command[0] not in ("launch", "train"):
        raise ConfigurationError(
            f"a run over several hosts needs a command that trains, got {command[0] if command else 'none'!r}; write "
            "launch or train, as for one host, such as: launch -n 4 train.py"
        )
