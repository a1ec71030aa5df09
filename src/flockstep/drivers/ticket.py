"""The ticket with which a script's process joins its run; it also holds the process's rank."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from types import TracebackType

import msgspec

from flockstep.drivers.member import Ticket, failure_of, knock
from flockstep.errors import ConfigurationError, FlockstepError

TICKET = "FLOCKSTEP_TICKET"
"""Environment variable in which a launcher passes the ticket to a script's process."""
SIZES = {
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "MV2_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",
    "WORLD_SIZE": "another launcher",
}
"""Environment variables in which other launchers store the number of processes that they started."""


def ticket_from_environment() -> Ticket | None:
    """The ticket that `flockstep launch` gave to this process; None if the process was not launched."""
    ticket = _ticket_of_script()
    return ticket if ticket is not None and ticket.process == os.getpid() else None


def _ticket_of_script() -> Ticket | None:
    """The ticket of this process's script, also in a process that the script started, such as a data
    loader's worker.
    """
    text = os.environ.get(TICKET)
    return None if text is None else msgspec.convert(msgspec.json.decode(text), Ticket)


def require_own_process(name: str) -> None:
    """Raise `ConfigurationError` in a process that the script of a run started, where `name` would act on its own.

    The process may call `name` while it imports the script again, as data loaders' workers do, because the result is
    unused.
    """
    ticket = _ticket_of_script()
    anew = getattr(multiprocessing.current_process(), "_inheriting", False)
    if ticket is not None and ticket.process != os.getpid() and not anew:
        raise ConfigurationError(
            f"this process was started by the script of worker {ticket.address}, and flockstep.{name} would "
            f"belong to no run here and process all data alone; call it in the script's own process, or unset {TICKET} "
            "where that is meant"
        )


def claim_ticket() -> Ticket | None:
    """The ticket of this process, which can be claimed once."""
    ticket = ticket_from_environment()
    if ticket is not None and ticket.claimed:
        raise ConfigurationError(
            "this process is already part of a run; call flockstep.distribute once in a script, and flockstep.join "
            "after it"
        )
    if ticket is not None:
        os.environ[TICKET] = ticket_to_text(replace(ticket, claimed=True))
    return ticket


def ticket_to_text(ticket: Ticket) -> str:
    """The ticket as text for the environment variable."""
    return msgspec.json.encode(asdict(ticket)).decode()


def place_of_script() -> tuple[int, int]:
    """Rank of this process's script and number of workers; (0, 1) for a script that was not launched.

    Raises:
        ConfigurationError: another launcher has started several processes, which would train independently.
    """
    ticket = _ticket_of_script()
    if ticket is not None:
        return ticket.address, ticket.workers
    refuse_other_launchers(os.environ)
    return 0, 1


def refuse_other_launchers(environment: Mapping[str, str]) -> None:
    """Raise `ConfigurationError` in a process that another launcher has started together with others."""
    for name, launcher in SIZES.items():
        size = environment.get(name, "")
        if TICKET not in environment and size.isdecimal() and int(size) > 1:
            by = "torchrun" if "TORCHELASTIC_RUN_ID" in environment else launcher
            raise ConfigurationError(
                f"this process is one of {size} that {by} started ({name}={size}), and each of them would train "
                f"alone on all data; start the script with flockstep launch -n {size} SCRIPT, or unset {name} where "
                "training alone is meant"
            )


def refuse(error: FlockstepError) -> None:
    """Report an error to the supervisor before this process joins.

    The supervisor prints the error instead of Python.
    """
    ticket, hook = ticket_from_environment(), sys.excepthook
    if ticket is None or ticket.claimed:
        return
    knock(ticket, failure_of(error, ticket, None))

    def quiet(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is not error:
            hook(kind, raised, trace)

    sys.excepthook = quiet
