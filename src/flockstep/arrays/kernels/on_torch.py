"""The kernels for torch tensors on any device: all functions of the modules imported here."""

from flockstep.arrays.kernels.torch_basics import *
from flockstep.arrays.kernels.torch_bits import *
from flockstep.arrays.kernels.torch_blocks import *
from flockstep.arrays.kernels.torch_floats import *
from flockstep.arrays.kernels.torch_matrices import *
from flockstep.arrays.kernels.torch_selection import *
from flockstep.arrays.kernels.torch_signs import *
