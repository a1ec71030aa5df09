"""Forks commands from a process that has done the imports of `flockstep train` and `flockstep launch`.

The process runs `import command_forker; exec(command_forker.program(FILE_DESCRIPTOR, MODULE, …))`. It takes requests
from a socket and reports how its children end; it ends with the socket. In a child `program` returns the program of the
command, which Python then runs to the end of the interpreter, as with `python -c`. The modules are further imports.

A command that will start the fork server of multiprocessing and its resource tracker gets a second and a third process
forked in the same way, which take the places of the interpreters that multiprocessing would start.
"""

import ctypes
import fcntl
import functools
import gc
import importlib
import json
import multiprocessing.process
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from multiprocessing import util
from types import CodeType
from typing import Any

import flockstep.cli.runs
import flockstep.launchers.entry
import flockstep.launchers.script
import flockstep.launchers.train  # noqa: F401
from flockstep.launchers.signals import STOPS

SPAWN = util.spawnv_passfds  # type: ignore[attr-defined]
WAITING: dict[str, tuple[int, socket.socket]] = {}
"""How the program of an interpreter begins that multiprocessing would start, and which process waits in its place."""
AWAY = 500
"""File descriptors from this number on are not in use."""
PLACE = b"\0TMPDIR="
"""The entry of the environment by which a process of a run is found (`support.processes.RealRun.processes`)."""


def program(requests: int, *modules: str) -> CodeType:
    """Fork a child for each request; return in the children only, with the program to run."""
    control, poll, children = socket.socket(fileno=requests), select.poll(), dict[int, int]()
    poll.register(control, select.POLLIN)
    for module in modules:
        importlib.import_module(module)
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
    """Refuse to fork what a new interpreter would not have: threads and open files."""
    opened = {int(name) for name in os.listdir("/proc/self/fd")} - files  # noqa: PTH208
    opened = {file for file in opened if os.path.lexists(f"/proc/self/fd/{file}")}  # the list itself was one
    if opened or threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208
        raise RuntimeError(f"the process has threads, or the open files {opened}")


def _become(request: dict[str, Any]) -> CodeType:
    """Make this process what the request describes, with a session of its own."""
    os.setsid()
    if request["host"] is not None:
        _enter(request["host"])
    os.chdir(request["folder"])
    multiprocessing.process.ORIGINAL_DIR = request["folder"]  # as if multiprocessing had been imported here
    for number, name in enumerate(("/dev/null", request["out"], request["err"])):
        file = os.open(name, os.O_WRONLY if number else os.O_RDONLY)
        os.dup2(file, number)
        os.close(file)
    _show_place(request["environment"]["TMPDIR"])
    if request["first"] is not None:
        sys.path.insert(1, request["first"])
    ours: list[socket.socket] = []
    tracker, server = (functools.partial(_expect, name) for name in ("resource_tracker", "forkserver"))
    for expect in (tracker, server) if request["forks"] else ():
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.append(here)
        pid = os.fork()
        if pid == 0:
            for one in ours:
                one.close()
            return _waiting(there)
        there.close()
        expect(pid, here)
    return _begun(request["environment"], request["program"], request["arguments"])


def _enter(process: int) -> None:
    """Enter the namespaces of another process, as `nsenter` does."""
    library = ctypes.CDLL(None, use_errno=True)
    for name in ("uts", "net", "mnt"):
        file = os.open(f"/proc/{process}/ns/{name}", os.O_RDONLY)
        if library.setns(file, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name} of process {process}")
        os.close(file)


def _begun(environment: dict[str, str], program: str, arguments: Sequence[str]) -> CodeType:
    """Give this process what it would not share with another, and return its program."""
    os.environ.clear()
    os.environ.update(environment)
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined] # what Python forgets
    multiprocessing.process.current_process().authkey = os.urandom(32)
    if "numpy.random" in sys.modules:
        from numpy import random

        random.set_bit_generator(random.MT19937())  # type: ignore[attr-defined] # no stub yet
    sys.argv[:] = ["-c", *arguments]
    sys.orig_argv[:] = [sys.executable, "-c", program, *arguments]
    return compile(program, "<string>", "exec")


def _expect(name: str, pid: int, control: socket.socket) -> None:
    """Let the process of this command that runs a module of multiprocessing be the waiting process `pid`."""
    WAITING[f"from multiprocessing.{name} import main"] = pid, control
    util.spawnv_passfds = _hand_over  # type: ignore[attr-defined]


def _hand_over(path: bytes, words: Sequence[str], files: Sequence[int]) -> int:
    """Let the process that waits for this program run it, and a new interpreter any other one, as
    `multiprocessing.util.spawnv_passfds` does.
    """
    begin = words[-1].partition(";")[0]
    if begin not in WAITING:
        started: int = SPAWN(path, words, files)
        return started
    pid, control = WAITING.pop(begin)
    mask = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
    work = {"program": words[-1], "environment": dict(os.environ), "mask": mask, "files": list(files)}
    socket.send_fds(control, [json.dumps({**work, "folder": os.getcwd()}).encode()], list(files))  # noqa: PTH109
    control.close()
    return pid


def _waiting(control: socket.socket) -> CodeType:
    """Wait until the command starts a process, and return that process's program; end with the command.

    Signals to all processes of the command do not concern this process before.
    """
    WAITING.clear()
    util.spawnv_passfds = SPAWN  # type: ignore[attr-defined]
    usual = {number: signal.signal(number, signal.SIG_IGN) for number in STOPS}
    said, files, _, _ = socket.recv_fds(control, 1 << 20, 200)
    if not said:
        os._exit(0)
    work = json.loads(said)
    signal.pthread_sigmask(signal.SIG_SETMASK, work["mask"])
    for number, handler in usual.items():
        signal.signal(number, handler)
    away = [fcntl.fcntl(file, fcntl.F_DUPFD, AWAY) for file in files]
    for file in (*files, control.detach()):
        os.close(file)
    for file, number in zip(away, work["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(work["folder"])
    return _begun(work["environment"], work["program"], [])


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
