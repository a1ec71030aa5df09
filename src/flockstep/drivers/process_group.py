"""What happens to a launched script that opens a process group of torch.distributed, as for DistributedDataParallel."""

from __future__ import annotations

import os
import sys
from types import TracebackType

OPENED = 84
"""Exit code of a script that has tried to open a process group; the supervisor says so, once for all ranks."""
REASON = (
    "the script opens a process group of torch.distributed (init_process_group), as for DistributedDataParallel, but "
    "under flockstep launch the strategy exchanges what DistributedDataParallel would; leave out this branch and the "
    "DistributedDataParallel wrapper, and use flockstep.rank() and flockstep.workers() in place of RANK and WORLD_SIZE"
)


def end_at_process_group() -> None:
    """Let a launched script end with the exit code `OPENED`, without a traceback, when torch finds no address for a
    group.

    A launched script has RANK and WORLD_SIZE, by which most scripts decide to open a group, but no MASTER_ADDR: with a
    group, DistributedDataParallel would average the gradients before the strategy sees them.
    """
    before = sys.excepthook

    def on_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        no_address = isinstance(error, ValueError) and "variable MASTER_ADDR expected" in str(error)
        # asked only now: a process that forks scripts has imported this module before they have a place in a run
        if no_address and "FLOCKSTEP_NODE_SPEC" in os.environ:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(OPENED)
        before(kind, error, trace)

    sys.excepthook = on_crash
