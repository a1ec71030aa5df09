"""The heavy parts of a worker of a declared job, imported once by the process that workers are forked from."""

import contextlib
import importlib
import sys

from flockstep.launchers import entry
from flockstep.transports.shared_group import warm_up

__all__ = ["entry"]

if sys.platform == "linux":
    warm_up()
with contextlib.suppress(ImportError):
    importlib.import_module("flockstep.frameworks.torch")
