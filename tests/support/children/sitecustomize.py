"""What Python does first in every process that a test starts: `PYTHONPATH` names this folder (`tests/conftest.py`).

Looking for garbage takes 0.2 s while torch is imported, and 0.6 s at the end. The destructors of torch's libraries take
0.16 s after Python's own end; the process ends before them. The compiler of torch, which the tests do
not use and every optimizer of torch imports, takes 1 to 1.4 s; an empty `torch._dynamo` takes its place.
"""

import atexit
import gc
import sys
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

gc.set_threshold(100_000, 10, 10)


@atexit.register
def _end_early() -> None:
    """Let the end of Python not look for garbage, and end the process before the destructors of libraries."""
    gc.freeze()
    if "torch" in sys.modules and sys.platform == "linux":
        import ctypes

        library = ctypes.CDLL(None)
        library.fflush(None)
        library.on_exit(library._exit, None)  # with the code of the process; the last registered is called first


class WithoutCompiler:
    """Finds `torch._dynamo`, and loads a module that leaves functions as they are."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == "torch._dynamo" else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python."""

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(
            disable=lambda function=None, *_, **__: function,
            graph_break=lambda: None,
            compiled_autograd=SimpleNamespace(_disable=nullcontext),
            config=SimpleNamespace(error_on_nested_fx_trace=True),
        )


WITHOUT_COMPILER = WithoutCompiler()
sys.meta_path.insert(0, WITHOUT_COMPILER)  # type: ignore[arg-type]
