"""The kernels for torch tensors on any device: the functions imported here; those for numpy also take tensors."""

from flockstep.arrays.kernels.numpy_selection import ascending as ascending
from flockstep.arrays.kernels.numpy_selection import gathered as gathered
from flockstep.arrays.kernels.numpy_selection import just_above as just_above
from flockstep.arrays.kernels.torch_basics import *
from flockstep.arrays.kernels.torch_bits import *
from flockstep.arrays.kernels.torch_blocks import *
from flockstep.arrays.kernels.torch_floats import *
from flockstep.arrays.kernels.torch_matrices import *
from flockstep.arrays.kernels.torch_selection import *
from flockstep.arrays.kernels.torch_signs import *
