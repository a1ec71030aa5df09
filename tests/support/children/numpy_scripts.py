"""Imports of the process that forks commands, for scripts without PyTorch; numba imports more for its first kernel."""

import numpy as np

import flockstep.drivers.loop
import flockstep.drivers.plan
import flockstep.launchers.preload
import flockstep.optimizers.sgd
import flockstep.strategies.all_reduce
import flockstep.transports.streams  # noqa: F401
from flockstep.arrays.kernels.numpy_bits import uniforms

uniforms(np.zeros(0, np.uint8), 8, 0)
