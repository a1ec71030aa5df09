"""Turns a starting interpreter into a process that imports what a script imports first, and forks the script's workers.

Python imports this file, found through `PYTHONPATH`, after its own start and before it runs the script of its command
line. The first process never runs the script: it preloads, forks, reports how its children end, and exits. In a child,
the import of this file ends, all traces of this file are removed, and Python runs the script as usual.

This file uses only modules that every interpreter has already loaded, and after the preload modules that torch has
loaded.
"""

# pathlib is not loaded
# ruff: noqa: PTH120, PTH123, PTH208

import _signal  # type: ignore[import-not-found] # what `signal` is made of
import os
import sys

PIPES = "FLOCKSTEP_PRELOAD"
"""Environment variable with the file descriptors of the pipes: one to read requests from, one to write reports to."""
NODE_SPEC = "FLOCKSTEP_NODE_SPEC"
DIFFERENT = ("RANK", "LOCAL_RANK", NODE_SPEC)
"""Environment variables that differ between the workers of a host."""
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
THREADS, FILES, MAPS = "/proc/self/task", "/proc/self/fd", "/proc/self/maps"
TIMERS = (_signal.ITIMER_REAL, _signal.ITIMER_VIRTUAL, _signal.ITIMER_PROF)
SHARED = b"rw-s"
"""Access flag, in a list of memory mappings, of memory that forked processes would share, such as a device's memory."""


class Declined(Exception):
    """Raised if a worker forked from this process would differ from a worker in a fresh interpreter."""


class EnvironmentWatch(type(os.environ)):  # type: ignore[misc] # os has no public name for it
    """Replaces `os.environ` while modules are imported; raises `Declined` if a module reads a variable that differs
    between workers.
    """

    asked = False

    def __getitem__(self, name: str) -> str:
        EnvironmentWatch.asked |= name in DIFFERENT
        return super().__getitem__(name)  # type: ignore[no-any-return]


def read(source: int) -> list[str]:
    """Read the next request of the launcher, and return its fields; an empty list at the end of the requests."""
    length = os.read(source, 8)
    if not length:
        return []
    data = b""
    while len(data) < int(length):
        data += os.read(source, int(length) - len(data))
    return os.fsdecode(data).split("\0")[:-1]


def changes(begun: dict[str, str]) -> dict[str, str | None]:
    """Return how imports have changed the environment since `begun`: name → new value, or None for a removed
    variable.
    """
    now = dict(os.environ)
    return {name: now.get(name) for name in {**begun, **now} if now.get(name) != begun.get(name)}


def started_with() -> dict[str, str]:
    """Return the environment with which this process was started, before any module could change it."""
    with open("/proc/self/environ", "rb") as file:
        entries = os.fsdecode(file.read()).split("\0")[:-1]
    return {entry.partition("=")[0]: entry.partition("=")[2] for entry in entries}


def as_without_this_file(begun: dict[str, str]) -> None:
    """Set the environment, and the copy of it in `begun`, to what they would be without this file in a fresh
    interpreter.
    """
    path = begun["PYTHONPATH"].partition(os.pathsep)[2]
    for environment in (os.environ, begun):
        del environment[PIPES]
        environment["PYTHONPATH"] = path
        if not path:
            del environment["PYTHONPATH"]


def usual_customization() -> BaseException | None:
    """Import the `sitecustomize` that Python would import without this file; return the error if the import fails."""
    folder = os.path.dirname(__file__)
    sys.path.remove(folder)
    sys.path_importer_cache.pop(folder, None)
    sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        return error
    return None


def preload(folder: str, imports: list[str]) -> None:
    """Import modules as the script does: each entry of `imports` is a module with the names that are imported from
    it.
    """
    for module in list(sys.modules.values()):  # those that .pth files import have been loaded already
        file = getattr(module, "__file__", None) or ""
        if module.__name__.partition(".")[0] not in sys.stdlib_module_names and file.endswith(".py"):
            with open(file, "rb") as source:
                text = source.read()
            EnvironmentWatch.asked |= any(name.encode() in text for name in DIFFERENT)
    before = set(sys.modules)
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)
    try:
        for words in imports:
            name, *attributes = words.split()
            __import__(name, {}, {}, attributes)
    finally:
        if not sys.flags.safe_path:
            sys.path.remove(folder)
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        own = os.path.dirname(file)
        if "." not in name and folder in (own, os.path.dirname(own)):
            raise Declined(f"{name} is a module of the script's folder")


def require_forkable(pipes: set[int]) -> None:
    """Raise `Declined` if a fork of this process, which has the open files `pipes`, would differ from a fresh
    interpreter.
    """
    if EnvironmentWatch.asked:
        raise Declined("a module reads an environment variable that differs between workers")
    if len(os.listdir(THREADS)) > 1 or sys.gettrace() or sys.getprofile():
        raise Declined("the process has threads, or is traced")
    if any(_signal.getitimer(timer)[0] for timer in TIMERS) or has_children():
        raise Declined("a module has set a timer or started a process, which a forked process would not have")
    opened = set(map(int, os.listdir(FILES))) - {0, 1, 2} - pipes
    opened = {file for file in opened if os.path.lexists(f"{FILES}/{file}")}  # the list itself was one
    with open(MAPS, "rb") as file:
        shared = any(line.split()[1] == SHARED for line in file)
    if opened or shared:
        raise Declined("a module has opened files, or maps memory or a device, which forked processes would share")
    os.close(os.pidfd_open(os.getpid()))  # the launcher needs this


def has_children() -> bool:
    """Return whether this process has a child process."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def draw_anew() -> None:
    """Give this process new random states, except for `random`, which Python seeds itself after a fork."""
    import torch

    torch.default_generator.seed()
    if "numpy.random" in sys.modules:
        from numpy import random

        random.set_bit_generator(random.MT19937())  # type: ignore[attr-defined] # no stub yet
    if "multiprocessing.process" in sys.modules:
        from multiprocessing.process import current_process

        current_process().authkey = os.urandom(32)


def become_worker(parent: int, fields: list[str], changed: dict[str, str | None], pipes: set[int]) -> None:
    """Turn this forked process into a worker: set its output and its environment, and let it end with the process
    `parent`.
    """
    import ctypes
    import json
    import threading

    ctypes.CDLL(None).prctl(DEATH_SIGNAL, _signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    os.dup2(int(fields[0]), 1)
    os.dup2(int(fields[1]), 2)
    for pipe in pipes:
        os.close(pipe)
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined] # what Python forgets
    source, sink = os.pipe()  # as a process that is started finds the secret
    os.write(sink, fields[2].encode())
    os.close(sink)
    os.set_inheritable(source, True)
    environment = dict(field.split("=", 1) for field in fields[3:])
    node_spec = json.loads(environment[NODE_SPEC])
    environment[NODE_SPEC] = json.dumps({**node_spec, "process": os.getpid(), "descriptor": source})
    for name, value in changed.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    os.environ.clear()
    os.environ.update(environment)
    draw_anew()


def watch(children: set[int], report: int) -> None:
    """Report the exit codes of the children, and end this process when all children have ended."""
    while children:
        pid, status = os.wait()
        if pid in children:
            children.remove(pid)
            os.write(report, b"ended %d %d\n" % (pid, os.waitstatus_to_exitcode(status)))
    os._exit(0)


def main() -> BaseException | None:
    """Preload and fork, as the launcher requests; this function returns only in the children.

    Returns the error of the usual `sitecustomize`, see `usual_customization`.
    """
    mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP))
    begun = started_with()
    request, report = map(int, begun[PIPES].split())
    as_without_this_file(begun)
    os.environ.__class__ = EnvironmentWatch
    try:
        folder, count, *rest = read(request)
        pipes, imports = set(map(int, rest[: int(count)])), rest[int(count) :]
        error = usual_customization()
        preload(folder, imports)
        sys.stdout.flush()
        sys.stderr.flush()
        import ctypes

        ctypes.CDLL(None).fflush(None)
        require_forkable(pipes | {request, report})
    except BaseException:  # noqa: BLE001 - even SystemExit
        os._exit(1)  # the launcher starts fresh interpreters, which show what is wrong
    os.environ.__class__ = EnvironmentWatch.__mro__[1]
    changed, parent, children = changes(begun), os.getpid(), set[int]()
    os.write(report, b"ready\n")
    while fields := read(request):
        try:
            pid = os.fork()
        except OSError:  # the launcher starts this worker, and all later ones, in fresh interpreters
            os.write(report, b"failed\n")
            continue
        if pid == 0:
            become_worker(parent, fields, changed, pipes | {request, report})
            _signal.pthread_sigmask(_signal.SIG_SETMASK, mask)
            return error
        children.add(pid)
        os.write(report, b"pid %d\n" % pid)
        for pipe in map(int, fields[:2]):
            os.close(pipe)
            pipes.remove(pipe)
    watch(children, report)
    return None


if __name__ == "sitecustomize" and (found := main()) is not None:
    raise found
