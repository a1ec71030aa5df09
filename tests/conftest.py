"""What holds for every test: nothing that it has started survives it, and of a matrix few cases run at every push."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

import support.children.sitecustomize  # noqa: F401 - what other processes do first, these do
from support.leaks import left, shared, usual_signals
from support.matrix import covering, never_chosen, values
from support.order import mixed
from support.processes import RealRun, end_forkers, search_path

if importlib.util.find_spec("flockstep_lab") is None:
    raise pytest.UsageError("the tests need flockstep-lab; run make venv, or .venv/bin/pip install --no-deps -e lab")
for name in ("COLUMNS", "PYTHONUNBUFFERED"):  # tables and output are as where nobody says how
    os.environ.pop(name, None)
os.environ["PYTHONPATH"] = search_path()
settings.register_profile("push", settings.get_profile("ci"), max_examples=15)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before -m chooses by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, object, object]:
    """Mark as `full` what adds no value to crossed parameters; mix the files where processes share them."""
    _mark(items)
    result = yield
    if hasattr(config, "workerinput"):
        items[:] = mixed(items)
    return result


def _mark(items: list[pytest.Item]) -> None:
    """Mark as `full` what adds to a test of crossed parameters no value, but another combination only."""
    tests = defaultdict[str, list[pytest.Function]](list)
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        if never_chosen(item):
            raise pytest.UsageError(
                f"{item.nodeid}: few(…) chooses cases for every push, and the test's own mark full keeps them from it; "
                f"take the mark or few(…) away"
            )
        if not item.get_closest_marker("full"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        kept = covering([values(case) for case in cases])
        for number, case in enumerate(cases):
            if number not in kept:
                case.add_marker(pytest.mark.full)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without looking for garbage; what is loaded by then is not looked through again later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is read from the user's home, and nothing written there."""
    before = os.environ.get("HOME")
    os.environ["HOME"] = str(tmp_path_factory.mktemp("home"))
    RealRun.usual = dict(os.environ)
    yield
    end_forkers()
    if before is not None:
        os.environ["HOME"] = before


@pytest.fixture(autouse=True)
def _nothing_is_left(_home: None) -> Iterator[None]:
    usual_signals()
    before, path = shared(), list(sys.path)
    yield
    while RealRun.started:
        RealRun.started.pop().close()
    sys.path[:] = path  # a job file's folder is searched from when it is read
    assert left(before) == [], "a test leaves what others share other than it was"
