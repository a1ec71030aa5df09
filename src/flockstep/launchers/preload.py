"""The heavy parts of a node, imported once by the process that nodes are forked from."""

import sys

from flockstep.launchers import entry
from flockstep.transports.shared_group import warm_up

__all__ = ["entry"]

if sys.platform == "linux":
    warm_up()
