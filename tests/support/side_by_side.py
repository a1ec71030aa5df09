"""Runs tests in several processes (`--processes`), which are forked from the process that has collected the tests."""

from __future__ import annotations

import atexit
import contextlib
import marshal
import os
import sys
from collections.abc import Iterator
from itertools import pairwise
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=1, metavar="N", help="run the tests in N processes, file by file")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in processes if there are to be several."""
    option = session.config.option
    if option.processes < 2 or option.collectonly or session.testsfailed:
        return None
    tests = _Tests(session)
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined] # the folder of all processes
    try:
        tests.run(option.processes)
    finally:
        tests.end()
    return True


class _Process:
    """A process that runs tests."""

    def __init__(self, pid: int):
        self.pid = pid
        self.tests: list[int] = []
        """Numbers of the tests that it has been given and has not reported; it runs the first of them."""


class _Tests:
    """The tests of a session, which processes run file by file."""

    def __init__(self, session: pytest.Session):
        self._session = session
        files = dict[Path, list[int]]()
        for number, item in enumerate(session.items):
            files.setdefault(item.path, []).append(number)
        self._waiting = list(files.values())[::-1]
        """Numbers of the tests of each file that no process has been given; the last file is the next."""
        self._running = dict[Connection, _Process]()

    def run(self, count: int) -> None:
        """Run all tests in `count` processes, and report them."""
        for _ in range(min(count, len(self._waiting))):
            self._start()
        while self._running:
            for ready in wait(list(self._running)):
                assert isinstance(ready, Connection)
                self._hear(ready)

    def end(self) -> None:
        """Wait until the processes have ended; each ends after its test if it can report to nobody."""
        for control in self._running:
            control.close()
        for process in self._running.values():
            os.waitpid(process.pid, 0)

    def _start(self) -> None:
        here, there = Pipe()
        pid = os.fork()
        if pid == 0:
            for control in (here, *self._running):
                control.close()
            _work(self._session, there)
        there.close()
        self._running[here] = _Process(pid)

    def _hear(self, control: Connection) -> None:
        """Pass on the reports of one test; a process that has none asks for the next file."""
        process = self._running[control]
        try:
            reports = marshal.loads(control.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._lose(control)
            return
        if reports:
            process.tests.pop(0)
            self._report(reports)
        else:
            process.tests = self._waiting.pop() if self._waiting else []
            control.send_bytes(marshal.dumps(process.tests))

    def _lose(self, control: Connection) -> None:
        """The process has ended; if it was in the middle of a test, the test fails, and another process goes on."""
        process = self._running.pop(control)
        control.close()
        code = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        if not process.tests:
            assert code == 0, f"a process ended with code {code} after its tests"
            return
        item, why = self._session.items[process.tests.pop(0)], f"its process ended with code {code}"
        config, report = item.config, pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
        if process.tests:
            self._waiting.append(process.tests)
        self._start()
        self._report([config.hook.pytest_report_to_serializable(config=config, report=report)])

    def _report(self, reports: list[Any]) -> None:
        hook = self._session.config.hook
        for data in reports:
            report = hook.pytest_report_from_serializable(config=self._session.config, data=data)
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)


class _Reports:
    """A plugin of a process that runs tests: keeps the reports of a test until they are sent."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self.kept: list[Any] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.kept.append(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))


def _work(session: pytest.Session, control: Connection) -> NoReturn:
    """Run tests until there are no more, in a process of its own."""
    code = 1
    try:
        _separate(session.config)
        with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
            _run(session, control)
        session._setupstate.teardown_exact(None)
        atexit._run_exitfuncs()
        code = 0
    except BaseException:  # noqa: BLE001
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(session: pytest.Session, control: Connection) -> None:
    reports = _Reports(session.config)
    session.config.pluginmanager.register(reports)
    for tests in _files(session, control):
        # after its last test a file is torn down, and what belongs to the session is left
        for item, following in pairwise([*tests, session]):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            control.send_bytes(marshal.dumps(reports.kept))
            reports.kept.clear()


def _files(session: pytest.Session, control: Connection) -> Iterator[list[pytest.Item]]:
    """Ask for the tests of one file after the other."""
    while True:
        control.send_bytes(marshal.dumps([]))
        numbers = marshal.loads(control.recv_bytes())
        if not numbers:
            return
        yield [session.items[number] for number in numbers]


def _separate(config: pytest.Config) -> None:
    """Give this process what it must not share: files of captured output, and a folder; its terminal is nobody's."""
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    terminal = config.pluginmanager.unregister(name="terminalreporter")
    terminal._tw._file = open(os.devnull, "w")  # noqa: PTH123, SIM115
    config.pluginmanager.register(SimpleNamespace(_tw=terminal._tw), "terminalreporter")  # for who asks for its writer
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = Path(factory.mktemp("process"))
