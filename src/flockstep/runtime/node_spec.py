"""The specification of a node, with which a script's process joins its run: rank, addresses and settings."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace

import msgspec

from flockstep.errors import ConfigurationError, FlockstepError
from flockstep.runtime.adoption import TIMEOUT, adopt, say_nothing_of
from flockstep.runtime.member import NodeSpec, failure_of, send_to_control
from flockstep.runtime.place import SECRET, place_from
from flockstep.runtime.session import first_session
from flockstep.strategies.base import Strategy, missing_strategy

NODE_SPEC = "FLOCKSTEP_NODE_SPEC"
"""Environment variable in which a launcher passes the node specification, without the secret, to a script's process."""
_feeds: dict[int, socket.socket] = {}
"""Process → socket over which its specification comes."""
_replicas: tuple[int, bool] = (1, False)
"""What the script has asked for: number of processes of a replica, and whether they may run on several hosts."""
_secrets: dict[str, str] = {}
"""Run → its secret. The secret is never in the environment, which children inherit and crash reports show."""


def spec_from_environment() -> NodeSpec | None:
    """Return the node specification that `flockstep launch` gave to this process; None if the process was not
    launched.
    """
    node_spec = _spec_of_script()
    if node_spec is None or node_spec.process != os.getpid():
        return None
    return replace(
        node_spec, secret=_secrets.get(node_spec.run, "")
    )  # none in a process that the script became by exec


def take_spec(node_spec: NodeSpec, claimed: int = 0) -> None:
    """Let this process be the process of the script that `node_spec` describes, of which `claimed` calls have begun."""
    _secrets[node_spec.run] = node_spec.secret
    os.environ[NODE_SPEC] = spec_to_text(replace(node_spec, process=os.getpid(), claimed=claimed))


def expect_spec(feed: socket.socket) -> None:
    """Let this process be that of a script whose node specification comes over a socket when its worker joins a run,
    after this process has written one byte, which says that it waits.
    """
    os.environ[NODE_SPEC] = ""
    _feeds[os.getpid()] = feed


def _receive_spec() -> None:
    """Wait until the worker of this process joins; end this process if it does not."""
    with _feeds.pop(os.getpid()) as feed, feed.makefile("rb") as file:
        feed.sendall(b"\0")
        data = file.read()
    if not data:
        os._exit(0)
    node_spec = msgspec.convert(msgspec.json.decode(data)["node_spec"], NodeSpec)
    take_spec(node_spec)
    rank, workers = str(node_spec.address), str(node_spec.workers)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=workers, LOCAL_WORLD_SIZE=workers)


def _spec_of_script() -> NodeSpec | None:
    """The node specification of this process's script, also in a process that the script started, such as a data
    loader's worker.
    """
    if os.getpid() in _feeds:
        _receive_spec()
    text = os.environ.get(NODE_SPEC)
    return None if not text else msgspec.convert(msgspec.json.decode(text), NodeSpec)


def require_own_process(name: str) -> None:
    """Raise `ConfigurationError` in a process that the script of a run has started, where a call of `name` would not
    belong to the run.

    A process that imports the script again, such as a data loader's worker, may call `name` during the import, because
    the result is not used.
    """
    node_spec = _spec_of_script()
    anew = getattr(multiprocessing.current_process(), "_inheriting", False)
    if node_spec is not None and node_spec.process != os.getpid() and not anew:
        raise ConfigurationError(
            f"this process was started by the script of worker {node_spec.address} and is not part of the run, so "
            f"after flockstep.{name} it would train alone on all data; call flockstep.{name} in the script's own "
            f"process, or unset {NODE_SPEC} if that is intended"
        )


def enter_run(timeout: float = TIMEOUT) -> NodeSpec | None:
    """Return the node specification of this process.

    A process that torchrun, mpirun or srun has started gets the specification from the agent of its host, which waits
    up to `timeout` seconds for all processes.

    Raises:
        ConfigurationError: the run cannot begin, or `timeout` is not > 0.
        RunError: the agent has ended.
    """
    if not timeout > 0:
        raise ConfigurationError(f"timeout must be > 0 s, got {timeout:g}; {TIMEOUT:g} is the default")
    place = None if NODE_SPEC in os.environ else place_from(os.environ)
    if place is not None:
        size, over_hosts = _replicas
        node_spec = adopt(place, sys.argv[0], timeout, replica_size=size, replica_over_hosts=over_hosts)
        os.environ.pop(SECRET, None)  # the agent has it, and what the script starts needs none
        take_spec(node_spec)
    return spec_from_environment()


def claim_spec() -> NodeSpec | None:
    """Return the node specification for the next call to `distribute` in this process; None if this process takes part
    in no run.
    """
    node_spec = enter_run()
    if node_spec is None:
        return None
    os.environ[NODE_SPEC] = spec_to_text(replace(node_spec, claimed=node_spec.claimed + 1))
    return node_spec.of_call(node_spec.claimed + 1)


def strategy_of_run(strategy: str | Strategy | None) -> Strategy:
    """Return the strategy that `flockstep launch --strategy` gave to this process's run; without one, `strategy`, the
    one that the script names.

    Raises:
        ConfigurationError: the text is no strategy, or neither names one.
    """
    node_spec = _spec_of_script()
    if node_spec is None or not node_spec.strategy:
        if strategy is None:
            raise missing_strategy('flockstep.distribute(model, optimizer, "…")')
        return Strategy.parse(strategy)
    if strategy is None:
        return Strategy.parse(node_spec.strategy)
    named = Strategy.parse(strategy)
    given = Strategy.parse(node_spec.strategy)
    if given != named and node_spec.address == 0 and sys.stderr is not None:
        with suppress(OSError, ValueError):  # a closed pipe, or a closed file
            sys.stderr.write(f"flockstep: --strategy {given} replaces {named}, the strategy that the script names\n")
    return given


def spec_to_text(node_spec: NodeSpec) -> str:
    """Return the node specification as text for the environment variable, which never holds the secret."""
    return msgspec.json.encode(asdict(replace(node_spec, secret=""))).decode()


def place_of_replica() -> tuple[int, int, int, int]:
    """Return, for the replica of this process's script, its number, this process's number in it, the number of its
    processes, and the number of replicas.
    """
    (rank, workers), node_spec = place_of_script(), _spec_of_script()
    size = node_spec.replica_size if node_spec is not None else _replicas[0] if workers > 1 else 1
    return rank // size, rank % size, size, workers // size


def ask_for_replicas(size: int, over_hosts: bool) -> None:
    """Let `size` processes hold one replica if torchrun, mpirun or srun has started the processes of the run.

    Raises:
        ConfigurationError: the size does not divide the number of processes, or the run has begun with another size.
    """
    global _replicas
    (_, workers), node_spec = place_of_script(), _spec_of_script()
    if size < 1 or (workers > 1 and workers % size):
        raise ConfigurationError(
            f"size must be a number that divides the number of processes, {workers}, got {size}; start a multiple of "
            f"{max(size, 1)} processes, or give flockstep.replica another size"
        )
    if node_spec is None:
        _replicas = size, over_hosts
    elif (node_spec.replica_size, node_spec.replica_over_hosts) != (size, over_hosts):
        raise ConfigurationError(
            f"the script asks for replicas of {size} processes{' over hosts' * over_hosts}, but the run has replicas "
            f"of {node_spec.replica_size}{' over hosts' * node_spec.replica_over_hosts}; give flockstep launch "
            f"--replica-size {size}{' --replica-over-hosts' * over_hosts}, or call flockstep.replica without arguments "
            "there; under torchrun, mpirun or srun call flockstep.replica before flockstep.distribute"
        )


def place_now(rank: int, workers: int) -> tuple[int, int]:
    """Return the rank of this process's script and the number of workers, which may change during a run; the arguments
    are the place until now.
    """
    node_spec = _spec_of_script()
    if node_spec is None or node_spec.replica_size > 1:
        return rank, workers
    return node_spec.address, node_spec.workers


def place_of_script() -> tuple[int, int]:
    """Return the rank of this process's script and the number of workers; (0, 1) for a script that was not launched.

    Raises:
        ConfigurationError: an unsupported launcher has started several processes, which would train independently.
    """
    node_spec = _spec_of_script()
    if node_spec is not None:
        return node_spec.address, node_spec.workers
    place = place_from(os.environ)
    return (0, 1) if place is None else (place.rank, place.workers)


def seed_of_script() -> int:
    """Return the seed of the run of this process's script; 0 for a script that was not launched."""
    place_of_script()  # refuses processes that would train independently
    node_spec = _spec_of_script()
    return 0 if node_spec is None else node_spec.seed


@contextmanager
def joining_run(name: str, timeout: float = TIMEOUT) -> Iterator[None]:
    """Context manager in which `flockstep.{name}` joins the run: custom components are imported, and errors are
    reported.

    `timeout` is passed to `enter_run`.

    Raises:
        ConfigurationError: the script of a launched run has started this process, or the run cannot begin.
    """
    from flockstep.frameworks.job import import_components

    require_own_process(name)
    node_spec = enter_run(timeout)
    try:
        import_components(node_spec.imports if node_spec is not None else ())
        yield
    except FlockstepError as error:
        refuse(error, node_spec)
        raise


def refuse(error: FlockstepError, before: NodeSpec | None) -> None:
    """Tell the supervisor about an error of a call that has not joined a run; `before` is the specification at the time
    of the call.

    The supervisor prints the error, and Python does not.
    """
    node_spec, first = spec_from_environment(), first_session()
    if node_spec is None or before is None or node_spec.claimed != before.claimed:
        return
    if node_spec.claimed == 0:
        send_to_control(node_spec, failure_of(error, node_spec, None))
    elif first is not None and first.failure is None:
        first.member.fail(failure_of(error, node_spec, None))
    say_nothing_of(error)
