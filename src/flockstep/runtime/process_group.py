"""What happens to a launched script that opens a process group of torch.distributed, as for DistributedDataParallel."""

from __future__ import annotations

import os
import sys

OPENED = 84
"""Exit code of a script that has tried to open a process group; the supervisor says so, once for all ranks."""
REASON = (
    "the script opens a process group of torch.distributed (init_process_group), as for DistributedDataParallel, but "
    "under flockstep launch the strategy exchanges what DistributedDataParallel would; leave out this branch and the "
    "DistributedDataParallel wrapper, and use flockstep.rank() and flockstep.workers() in place of RANK and WORLD_SIZE"
)


def end_if_opened(error: BaseException) -> None:
    """End a launched script with the exit code `OPENED` if its error is that torch finds no address for a group.

    The script has RANK and WORLD_SIZE, by which most scripts decide to open a group, but no MASTER_ADDR: with a group,
    DistributedDataParallel would average the gradients before the strategy sees them.
    """
    no_address = isinstance(error, ValueError) and "variable MASTER_ADDR expected" in str(error)
    if no_address:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(OPENED)
