"""Lets a command's scripts be forked from a process that has done the imports of the scripts (see `command_forker`).

`flockstep launch` starts one process for each host that imports what the script imports, and forks the workers
(decision 0062). Here a child of the command, which has done those imports already, becomes that process.
"""

import ctypes
import importlib.util
import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace, TracebackType
from typing import IO, Any

from flockstep.launchers import script_forker, top_imports

DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of linux/prctl.h."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that numerical libraries read when they are loaded, and hence here before a script can set them."""


class Preload:
    """The waiting child of the command, in the place of the process that a `ScriptForker` starts."""

    def __init__(
        self,
        pid: int,
        control: socket.socket,
        command: Sequence[str],
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        **_: int,
    ):
        self._pid = pid
        script_forker.subprocess = subprocess
        out, out_there = os.pipe()
        err, err_there = os.pipe()
        self.stdout: IO[bytes] = os.fdopen(out, "rb")
        self.stderr: IO[bytes] = os.fdopen(err, "rb")
        work = {"command": list(command), "environment": dict(env), "files": [*pass_fds, 1, 2], "mask": []}
        given = [*pass_fds, out_there, err_there]
        socket.send_fds(control, [json.dumps({**work, "folder": str(Path.cwd())}).encode()], given)
        control.close()
        os.close(out_there)
        os.close(err_there)

    def kill(self) -> None:
        """Send SIGKILL to the process."""
        os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait until the process has ended."""
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def expect(pid: int, control: socket.socket) -> None:
    """Let the first process that a `ScriptForker` of this command starts be the waiting child `pid`."""

    def started(command: Sequence[str], **how: Any) -> Preload:
        return Preload(pid, control, command, **how)

    script_forker.subprocess = SimpleNamespace(Popen=started, PIPE=subprocess.PIPE)  # type: ignore[assignment]
    if "torch" not in sys.modules:
        script_forker.top_imports = _top_imports


def _top_imports(script: Path, path: Sequence[str] = (), usual: Any = top_imports.top_imports) -> list[str]:
    """Imports for a script without torch, which a `ScriptForker` does not fork; none for `python -m`."""
    if script.parent == Path(script_forker.__file__).parent:
        return []
    try:
        compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return []
    return usual(script, path) or ["numpy"]


def worker(work: Mapping[str, Any]) -> CodeType:
    """Be the process that a `ScriptForker` starts; return the script's program, in the workers only."""
    command, environment = work["command"], work["environment"]
    launcher, script, *arguments = command[command.index("-S") + 2 :]
    if any(environment.get(name, "1") != "1" for name in THREADS):
        os._exit(1)  # then the launcher starts fresh interpreters
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):
        os._exit(1)
    os.environ.clear()
    os.environ.update(environment)
    preload = _preload()
    preload.main()
    if environment.get("PYTHONUNBUFFERED"):
        for number, name in ((1, "stdout"), (2, "stderr")):
            setattr(sys, name, _unbuffered(number, getattr(sys, name)))
            setattr(sys, f"__{name}__", getattr(sys, name))
    return program(script, arguments)


def _unbuffered(number: int, stream: Any) -> Any:
    """The stream as Python opens it if output is not to be buffered."""
    raw: Any = io.FileIO(number, "w", closefd=False)
    raw.name = stream.name
    new: Any = io.TextIOWrapper(raw, stream.encoding, stream.errors, newline="\n", write_through=True)
    new.mode = stream.mode
    return new


def _preload() -> ModuleType:
    """The module that flockstep puts in the place of `sitecustomize`, for a process that has begun without it."""
    file = script_forker.FOLDER / "sitecustomize.py"
    spec = importlib.util.spec_from_file_location("preload", file)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.started_with = lambda: dict(os.environ)
    module.usual_customization = lambda: None
    module.preload = _imported
    if "torch" not in sys.modules:
        module.draw_anew = _drawn_anew
    return module  # type: ignore[no-any-return]


def _imported(folder: str, imports: Sequence[str]) -> None:
    sys.path.insert(0, folder)
    for words in imports:
        name, *attributes = words.split()
        __import__(name, {}, {}, attributes)
    sys.path.remove(folder)


def _drawn_anew() -> None:
    from multiprocessing.process import current_process

    from numpy import random

    random.set_bit_generator(random.MT19937())  # type: ignore[attr-defined] # no stub yet
    current_process().authkey = os.urandom(32)


def program(script: str, arguments: Sequence[str]) -> CodeType:
    """Make `__main__` the script's module, and return its program."""
    sys.argv[:] = [script, *arguments]
    sys.orig_argv[:] = [sys.executable, script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    main: Any = sys.modules["__main__"]
    for name in [name for name in vars(main) if not name.startswith("__")]:
        delattr(main, name)
    main.__file__ = script
    main.__cached__ = None
    main.__loader__ = SourceFileLoader("__main__", script)
    sys.excepthook = _without_first_frame
    return compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)


def _without_first_frame(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error as Python does, without the frame of the program that runs the script's program."""
    sys.__excepthook__(kind, error.with_traceback(trace and trace.tb_next), None)
