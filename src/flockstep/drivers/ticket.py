"""The ticket by which a script's process finds its run, and what it says: this process's rank among the workers."""

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
"""The environment variable by which a launcher lets a script's process into a run."""
SIZES = {
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "MV2_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",
    "WORLD_SIZE": "another launcher",
}
"""Environment variables in which other launchers say how many processes they started."""


def ticket_from_environment() -> Ticket | None:
    """The ticket that `flockstep launch` gave this process; None where nobody launched it."""
    ticket = _ticket_of_script()
    return ticket if ticket is not None and ticket.process == os.getpid() else None


def _ticket_of_script() -> Ticket | None:
    """The ticket of the script that this process is, or that started this process, such as a loader's worker."""
    text = os.environ.get(TICKET)
    return None if text is None else msgspec.convert(msgspec.json.decode(text), Ticket)


def require_own_process(name: str) -> None:
    """Raise `ConfigurationError` in a process that a script of a run started, which would do everything alone.

    It may call `name` while it imports the script anew, as loaders' workers do: what follows does not depend on it.
    """
    ticket = _ticket_of_script()
    anew = getattr(multiprocessing.current_process(), "_inheriting", False)
    if ticket is not None and ticket.process != os.getpid() and not anew:
        raise ConfigurationError(
            f"this process was started by the script of worker {ticket.address}, and flockstep.{name} would take part "
            f"in no run here but go over everything alone; call it in the script's own process, or unset {TICKET} "
            "where that is meant"
        )


def claim_ticket() -> Ticket | None:
    """The same, for the only part that this process can take in the run."""
    ticket = ticket_from_environment()
    if ticket is not None and ticket.claimed:
        raise ConfigurationError(
            "this process takes part in a run already; call flockstep.distribute once in a script, and flockstep.join "
            "after it"
        )
    if ticket is not None:
        os.environ[TICKET] = ticket_to_text(replace(ticket, claimed=True))
    return ticket


def ticket_to_text(ticket: Ticket) -> str:
    """What to put into the environment."""
    return msgspec.json.encode(asdict(ticket)).decode()


def place_of_script() -> tuple[int, int]:
    """The rank of this process's script and the number of workers; (0, 1) for a script that nobody launched.

    Raises:
        ConfigurationError: another launcher has started several processes, which know nothing of one another.
    """
    ticket = _ticket_of_script()
    if ticket is not None:
        return ticket.address, ticket.workers
    refuse_other_launchers(os.environ)
    return 0, 1


def refuse_other_launchers(environment: Mapping[str, str]) -> None:
    """Raise `ConfigurationError` in one of several processes that no run of ours has started."""
    for name, launcher in SIZES.items():
        size = environment.get(name, "")
        if TICKET not in environment and size.isdecimal() and int(size) > 1:
            by = "torchrun" if "TORCHELASTIC_RUN_ID" in environment else launcher
            raise ConfigurationError(
                f"this process is one of {size} that {by} started ({name}={size}), and each of them would train alone "
                f"on everything; start the script with flockstep launch -n {size} SCRIPT, or unset {name} where "
                "training alone is meant"
            )


def refuse(error: FlockstepError) -> None:
    """Tell the supervisor of an error before this process takes part; it prints the sentence, so Python need not."""
    ticket, hook = ticket_from_environment(), sys.excepthook
    if ticket is None or ticket.claimed:
        return
    knock(ticket, failure_of(error, ticket, None))

    def quiet(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is not error:
            hook(kind, raised, trace)

    sys.excepthook = quiet
