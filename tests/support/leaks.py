"""What the tests of a process share: none may leave it other than it was, or the order of files decides what fails."""

from __future__ import annotations

import os
import signal
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np

from flockstep import registry

OTHERS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
"""Variables of the environment that pytest and numerical libraries set themselves."""


def shared() -> dict[str, Any]:
    """What it is now, by what it is called; of torch only if something has imported it."""
    registry.nouns()  # loads the tables of other installed distributions, once
    found = {
        "the working folder": Path.cwd(),
        "numpy's handling of errors": np.geterr(),
        "the registry": {noun: tuple(registry.names(noun)) for noun in registry.nouns()},
        "tracing of memory": tracemalloc.is_tracing(),
    }
    found |= {f"${name}": text for name, text in os.environ.items() if name not in OTHERS}
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_num_threads"):
        found["torch's threads"] = torch.get_num_threads()
        found["torch's default type"] = torch.get_default_dtype()
        found["torch's deterministic algorithms"] = torch.are_deterministic_algorithms_enabled()
    return found


def left(before: dict[str, Any]) -> list[str]:
    """What has changed since; settings of a library that was imported since have no state before."""
    now = shared()
    names = [name for name in {**before, **now} if name in before or name.startswith("$")]
    return [f"{name} was {before.get(name)}, is {now.get(name)}" for name in names if before.get(name) != now.get(name)]


def usual_signals() -> None:
    """Let signals do what they do by default: a process inherits what is ignored here."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for kind in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, signal.SIG_DFL)
