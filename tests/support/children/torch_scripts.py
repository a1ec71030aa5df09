"""Imports of the process that forks commands, for scripts and jobs with PyTorch."""

import numpy_scripts  # noqa: F401
import torch.utils.data  # noqa: F401
