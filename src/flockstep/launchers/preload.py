"""Loads the kernels for sums in shared memory, once for all processes that the fork server starts."""

import sys

from flockstep.links.shared_group import warm_up

if sys.platform == "linux":
    warm_up()
