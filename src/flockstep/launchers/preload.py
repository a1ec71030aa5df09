"""The heavy imports of a node, done once by the fork server."""

import sys

from flockstep.launchers import entry
from flockstep.transports.shared_group import warm_up

__all__ = ["entry"]

if sys.platform == "linux":
    warm_up()
