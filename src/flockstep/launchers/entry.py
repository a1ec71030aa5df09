"""What the processes of a run do that are forked."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys

from flockstep.arrays.schema import Schema
from flockstep.drivers.member import Ticket, die_with
from flockstep.drivers.process import run_server, run_worker
from flockstep.drivers.setup import prepare
from flockstep.frameworks.job import import_components
from flockstep.launchers.scratch import fork_servers_folder
from flockstep.records.config import RunConfig


def worker_main(ticket: Ticket, threads: int, config: str) -> None:
    """A worker process: rebuilds the job from the text of the run's configuration."""
    die_with(ticket.supervisor, ticket.directory, *fork_servers_folder())
    limit_process(threads)

    def make():  # type: ignore[no-untyped-def]
        engine, plan, _ = prepare(RunConfig.from_toml(config, "the run's configuration"))
        return engine, plan

    sys.exit(run_worker(ticket, make))


def server_main(
    ticket: Ticket, index: int, strategy: str, optimizer: str, schema: Schema, every: int, imports: tuple[str, ...]
) -> None:
    """A server process: needs neither the job nor its framework, only what strategy and optimiser are made of."""
    die_with(ticket.supervisor, ticket.directory, *fork_servers_folder())
    limit_process(1)
    import_components(imports)
    sys.exit(run_server(ticket, index, strategy, optimizer, schema, every))


def limit_process(threads: int) -> None:
    """Let numerical libraries use that many threads in this process of a run, those that are imported later too."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    limit_threads(threads)


def limit_threads(threads: int) -> None:
    """Let the numerical libraries that are imported by now use that many threads: more only fight over the cores.

    A user's own process calls it again after something may have imported more; its environment is the user's.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
    with contextlib.suppress(ImportError):  # it comes with scikit-learn; numpy alone cannot say it to its BLAS
        importlib.import_module("threadpoolctl").threadpool_limits(threads)
