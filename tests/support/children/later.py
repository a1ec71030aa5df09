"""What a script with PyTorch imports when it calls `flockstep.distribute`, and what numba imports for its first kernel.

The process that forks such scripts imports this file first (`support.processes.EAGER`), so that each host does it once.
"""

import numpy as np

import flockstep.drivers.torch_loop
import flockstep.strategies.all_reduce
import flockstep.transports.streams  # noqa: F401
from flockstep.arrays.kernels.numpy_digest import digest

digest(np.zeros(8, np.float32))
