"""Imports the scripts of benchmarks/ as modules."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType


@cache
def benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"benchmark_{name}", Path(__file__).parents[2] / f"benchmarks/{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module
