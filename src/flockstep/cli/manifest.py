"""`flockstep manifest`: writes Kubernetes objects that run a command in pods."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import click

from flockstep.cli import options as o
from flockstep.cli import show
from flockstep.cli.coordinate import understood
from flockstep.errors import ConfigurationError
from flockstep.options import Arg, Opt


@dataclass(frozen=True, kw_only=True)
class PodOptions:
    """Options about the pods."""

    image: Annotated[str, Opt("Container image that contains flockstep and everything the command needs.")]
    nodes: int = Opt("Number of pods; each pod is one host of the run.").default(2)
    name: str = Opt("Name of the Kubernetes Job, Service and Secret.").default("flockstep")
    port: int = Opt("Port on which pod 0 listens as the coordinator.").default(29400)
    cpu: str | None = Opt("CPU cores of each pod, such as 4 or 500m.").default()
    memory: str | None = Opt("Memory of each pod, such as 8Gi.").default()
    gpus: int = Opt("Number of GPUs of each pod.").default(0)
    claim: str | None = Opt(
        "PersistentVolumeClaim (ReadWriteMany) for the record (default: the record is deleted with pod 0)."
    ).default()
    secret: str | None = Opt(
        "Existing Secret that holds the run's secret under the key secret (default: the manifest contains a "
        "new Secret)."
    ).default()


def manifest(
    context: click.Context,
    command: Annotated[
        tuple[str, ...],
        Arg("Command of the run, written as for one host: flockstep manifest --image IMAGE launch -n 4 train.py."),
    ],
    options: PodOptions,
    as_json: o.Json = False,
) -> None:
    """Print a manifest for `kubectl apply -f -`: an indexed Job whose pods are the hosts of a run."""
    from flockstep.launchers.kubernetes import Pods, require_trains
    from flockstep.launchers.kubernetes import manifest as objects_of

    words = list(command)
    require_trains(words)
    # the command is parsed here, rather than in every pod
    inner = understood(context, words, "gets its value in each pod from the manifest", allowed=("timeout",))
    if (workers := inner.params["workers"]) < options.nodes:
        raise ConfigurationError(
            f"a run in {options.nodes} pods needs at least {options.nodes} workers, got {workers}; raise -n, the "
            "number of workers of all pods"
        )
    objects = objects_of(Pods(**asdict(options)), words)
    if as_json:
        show.json(objects)
    else:
        print(json.dumps(objects, indent=2))
