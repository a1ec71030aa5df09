"""Runs a user's script in a process that is forked for a worker of a run."""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from flockstep.launchers.threads import limit_threads
from flockstep.runtime.member import NodeSpec
from flockstep.runtime.node_spec import expect_spec, take_spec
from flockstep.runtime.process_group import end_if_opened
from flockstep.system import STOPS

MODULE_ENTRY = Path(os.__file__).with_name("runpy.py")
"""Script that runs the module which its first argument names, as `python -m` does."""
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class ScriptProgram:
    """A script, and how its process runs it."""

    script: Path
    arguments: tuple[str, ...]
    environment: dict[str, str]
    """All environment variables of the process, except the node specification."""
    threads: int | None
    """Threads of the numerical libraries; None: as the environment says."""


def script_main(
    node_spec: NodeSpec | None, program: ScriptProgram, feed: socket.socket | None, out: Connection, err: Connection
) -> NoReturn:
    """Entry point of a worker process that runs a script, whose output goes to the pipes `out` and `err`; without
    a `node_spec`, it comes over the socket `feed` when the worker joins.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the launcher, which ends the run in order
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    _end_with_launcher()
    for number, pipe in enumerate((out, err), 1):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    with suppress(OSError):  # multiprocessing has replaced it, and the launcher may have closed it
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(program.environment)
    if node_spec is not None:
        take_spec(node_spec)
    elif feed is not None:
        expect_spec(feed)
    _become_main()
    if program.threads is not None:  # a fork server that an earlier run has started loads libraries with other limits
        limit_threads(program.threads)
    _draw_anew()
    code = 0
    try:
        _run(program)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            sys.stderr.write(f"{end.code}\n")
            code = 1
        else:
            code = end.code or 0
    except BaseException as error:  # noqa: BLE001 - as Python's own end of a script
        code = 1
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != str(program.script.absolute()):
            trace = trace.tb_next  # begins at the script's own frame; an error before the first statement has none
        end_if_opened(error)
        error = error.with_traceback(trace or error.__traceback__)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
    ctypes.pythonapi.Py_Exit(code)  # a process of multiprocessing would end without exit handlers
    raise AssertionError("Py_Exit does not return")


def _end_with_launcher() -> None:
    """Let this process be killed when its parent, the fork server, ends, which ends with the launcher.

    The fork server ends when the last process has closed its pipe, so this process closes its end. Whatever the
    script itself starts with multiprocessing comes from a fork server of its own.
    """
    server: Any = multiprocessing.forkserver._forkserver  # multiprocessing has no public way
    os.close(server._forkserver_alive_fd)
    server.__init__()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    launcher = multiprocessing.parent_process()
    if launcher is None or not launcher.is_alive():  # it has ended before
        os._exit(1)


def _become_main() -> None:
    """Let multiprocessing take this process for a main process, as that of a script is."""
    current: Any = process.current_process()
    current.name, current.authkey, current._identity = "MainProcess", os.urandom(32), ()
    process._parent_process = None  # type: ignore[attr-defined] # no public way
    multiprocessing.set_start_method(None, force=True)  # data loaders start their processes in the usual way again


def _draw_anew() -> None:
    """Give this process random states of its own, except for `random`, which Python seeds itself after a fork.

    Otherwise all workers of a script that sets no seed would draw the same samples and the same dropout masks.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()


def _run(program: ScriptProgram) -> None:
    arguments = list(program.arguments)
    if program.script == MODULE_ENTRY:
        sys.path[0] = os.getcwd()  # noqa: PTH109
        sys.argv[:] = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(program.script.resolve().parent)
        sys.argv[:] = [str(program.script), *arguments]
        runpy.run_path(str(program.script.absolute()), run_name="__main__")
