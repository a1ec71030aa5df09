"""Imports of the process that forks commands, for scripts without PyTorch; numba imports more for its first kernel."""

import numpy as np

from flockstep.arrays.kernels.numpy_bits import uniforms

uniforms(np.zeros(0, np.uint8), 8, 0)
