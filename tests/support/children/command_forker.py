"""Forks commands from a process that has done the imports of `flockstep train` and `flockstep launch`.

The process runs `import command_forker; exec(command_forker.program(FILE_DESCRIPTOR))`. It takes requests from a
socket and reports how its children end; it ends with the socket. In a child `program` returns the program of the
command, which Python then runs to the end of the interpreter, as with `python -c`.
"""

import ctypes
import gc
import json
import multiprocessing.process
import os
import select
import socket
import sys
import threading
from types import CodeType
from typing import Any

import flockstep.cli.runs
import flockstep.launchers.script
import flockstep.launchers.train  # noqa: F401

PLACE = b"\0TMPDIR="
"""The entry of the environment by which a process of a run is found (`support.processes.RealRun.processes`)."""


def program(requests: int) -> CodeType:
    """Fork a child for each request; return in the children only, with the program to run."""
    control, poll, children = socket.socket(fileno=requests), select.poll(), dict[int, int]()
    poll.register(control, select.POLLIN)
    _require_forkable({0, 1, 2, requests})
    gc.freeze()
    while True:
        for ready, _ in poll.poll():
            if ready != requests:
                _, status = os.waitpid(children[ready], 0)
                control.send(b"%d %d" % (children.pop(ready), os.waitstatus_to_exitcode(status)))
                poll.unregister(ready)
                os.close(ready)
            elif not (request := control.recv(1 << 20)):
                os._exit(0)
            elif (pid := os.fork()) == 0:
                for file in (*children, control.detach()):
                    os.close(file)
                return _become(json.loads(request))
            else:
                handle = os.pidfd_open(pid)
                children[handle] = pid
                poll.register(handle, select.POLLIN)
                control.send(b"%d" % pid)


def _require_forkable(files: set[int]) -> None:
    """Refuse to fork what a new interpreter would not have: threads, open files, PyTorch."""
    opened = {int(name) for name in os.listdir("/proc/self/fd")} - files  # noqa: PTH208
    opened = {file for file in opened if os.path.lexists(f"/proc/self/fd/{file}")}  # the list itself was one
    if opened or threading.active_count() > 1 or "torch" in sys.modules or len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208
        raise RuntimeError(f"the process has threads, the open files {opened}, or has imported torch")


def _become(request: dict[str, Any]) -> CodeType:
    """Make this process what the request describes, with a session of its own."""
    os.setsid()
    os.chdir(request["folder"])
    for number, name in enumerate(("/dev/null", request["out"], request["err"])):
        file = os.open(name, os.O_WRONLY if number else os.O_RDONLY)
        os.dup2(file, number)
        os.close(file)
    _show_place(request["environment"]["TMPDIR"])
    os.environ.clear()
    os.environ.update(request["environment"])
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined] # what Python forgets
    multiprocessing.process.current_process().authkey = os.urandom(32)
    if "numpy.random" in sys.modules:
        from numpy import random

        random.set_bit_generator(random.MT19937())  # type: ignore[attr-defined] # no stub yet
    sys.argv[:] = ["-c", *request["arguments"]]
    sys.orig_argv[:] = [sys.executable, "-c", request["program"], *request["arguments"]]
    sys.path.insert(1, request["first"])
    return compile(request["program"], "<string>", "exec")


def _show_place(folder: str) -> None:
    """Write the folder into the memory that others read as this process's environment; its length stays the same."""
    with open("/proc/self/stat", "rb") as file:  # noqa: PTH123
        begin = int(file.read().rpartition(b")")[2].split()[47])
    with open("/proc/self/environ", "rb") as file:  # noqa: PTH123
        entries = b"\0" + file.read()
    value, at = folder.encode(), entries.index(PLACE) + len(PLACE)
    if entries[at + len(value)]:
        raise RuntimeError(f"{folder} must be as long as the folder that this process was started with")
    ctypes.memmove(begin + at - 1, value, len(value))
