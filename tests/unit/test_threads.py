"""The option `threads` takes effect for numpy, whose library for linear algebra has threads of its own."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
import threadpoolctl

from flockstep.launchers.threads import limit_threads


def test_threads_take_effect_for_numpy() -> None:
    with threadpoolctl.threadpool_limits(2):  # what the test changes is set back at its end
        for threads in (2, 1):
            limit_threads(threads)
            found = {one["num_threads"] for one in threadpoolctl.threadpool_info() if one["user_api"] == "blas"}
            assert found == {threads}


def test_threads_without_their_library_are_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the library is one that flockstep is installed with."""
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    with pytest.raises(ImportError, match="threadpoolctl"):
        limit_threads(1)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert any(one.startswith("threadpoolctl") for one in project["dependencies"])
