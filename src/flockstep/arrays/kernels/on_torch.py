"""Primitives for torch tensors, on whatever device they lie: every function of these files, which hold a group each."""

from flockstep.arrays.kernels.torch_basics import *
from flockstep.arrays.kernels.torch_bits import *
from flockstep.arrays.kernels.torch_blocks import *
from flockstep.arrays.kernels.torch_floats import *
from flockstep.arrays.kernels.torch_matrices import *
from flockstep.arrays.kernels.torch_selection import *
from flockstep.arrays.kernels.torch_signs import *
