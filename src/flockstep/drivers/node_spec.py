"""The specification of a node, with which a script's process joins its run: rank, addresses and settings."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from types import TracebackType

import msgspec

from flockstep.drivers.member import NodeSpec, failure_of, send_to_control
from flockstep.drivers.place import place_from
from flockstep.errors import ConfigurationError, FlockstepError

NODE_SPEC = "FLOCKSTEP_NODE_SPEC"
"""Environment variable in which a launcher passes the node specification to a script's process."""


def spec_from_environment() -> NodeSpec | None:
    """The node specification that `flockstep launch` gave to this process; None if the process was not launched."""
    node_spec = _spec_of_script()
    return node_spec if node_spec is not None and node_spec.process == os.getpid() else None


def _spec_of_script() -> NodeSpec | None:
    """The node specification of this process's script, also in a process that the script started, such as a data
    loader's worker.
    """
    text = os.environ.get(NODE_SPEC)
    return None if text is None else msgspec.convert(msgspec.json.decode(text), NodeSpec)


def require_own_process(name: str) -> None:
    """Raise `ConfigurationError` in a process that the script of a run started, where `name` would act on its own.

    The process may call `name` while it imports the script again, as data loaders' workers do, because the result is
    unused.
    """
    node_spec = _spec_of_script()
    anew = getattr(multiprocessing.current_process(), "_inheriting", False)
    if node_spec is not None and node_spec.process != os.getpid() and not anew:
        raise ConfigurationError(
            f"this process was started by the script of worker {node_spec.address}, and flockstep.{name} would "
            "belong to no run here and process all data alone; call it in the script's own process, or unset "
            f"{NODE_SPEC} "
            "where that is meant"
        )


def claim_spec() -> NodeSpec | None:
    """The node specification of this process, which can be claimed once."""
    node_spec = spec_from_environment()
    if node_spec is not None and node_spec.claimed:
        raise ConfigurationError(
            "this process is already part of a run; call flockstep.distribute once in a script, and flockstep.join "
            "after it"
        )
    if node_spec is not None:
        os.environ[NODE_SPEC] = spec_to_text(replace(node_spec, claimed=True))
    return node_spec


def spec_to_text(node_spec: NodeSpec) -> str:
    """The node specification as text for the environment variable."""
    return msgspec.json.encode(asdict(node_spec)).decode()


def place_of_script() -> tuple[int, int]:
    """Rank of this process's script and number of workers; (0, 1) for a script that was not launched.

    Raises:
        ConfigurationError: another launcher has started several processes, which would train independently.
    """
    node_spec = _spec_of_script()
    if node_spec is not None:
        return node_spec.address, node_spec.workers
    refuse_other_launchers(os.environ)
    return 0, 1


def refuse_other_launchers(environment: Mapping[str, str]) -> None:
    """Raise `ConfigurationError` in a process that another launcher has started together with others."""
    place = None if NODE_SPEC in environment else place_from(environment)
    if place is not None:
        raise ConfigurationError(
            f"this process is rank {place.rank} of {place.workers} that {place.by} started, and each of them would "
            f"train alone on all data; start the script with flockstep launch -n {place.workers} SCRIPT"
        )


def refuse(error: FlockstepError) -> None:
    """Report an error to the supervisor before this process joins.

    The supervisor prints the error instead of Python.
    """
    node_spec, hook = spec_from_environment(), sys.excepthook
    if node_spec is None or node_spec.claimed:
        return
    send_to_control(node_spec, failure_of(error, node_spec, None))

    def quiet(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is not error:
            hook(kind, raised, trace)

    sys.excepthook = quiet
