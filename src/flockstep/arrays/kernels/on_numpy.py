"""The kernels for numpy arrays: all functions of the modules imported here."""

from flockstep.arrays.kernels.numpy_basics import *
from flockstep.arrays.kernels.numpy_bits import *
from flockstep.arrays.kernels.numpy_blocks import *
from flockstep.arrays.kernels.numpy_floats import *
from flockstep.arrays.kernels.numpy_matrices import *
from flockstep.arrays.kernels.numpy_selection import *
from flockstep.arrays.kernels.numpy_signs import *
