"""Primitives for numpy arrays: every function of these files, which hold a group each."""

from flockstep.arrays.kernels.numpy_basics import *
from flockstep.arrays.kernels.numpy_bits import *
from flockstep.arrays.kernels.numpy_blocks import *
from flockstep.arrays.kernels.numpy_floats import *
from flockstep.arrays.kernels.numpy_matrices import *
from flockstep.arrays.kernels.numpy_selection import *
from flockstep.arrays.kernels.numpy_signs import *
