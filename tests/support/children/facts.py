"""What a process can see of itself."""

import atexit
import ctypes
import faulthandler
import gc
import json
import locale
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np

# ruff: noqa: PTH109, PTH115, PTH208


def stream(file):
    kind = os.fstat(file.fileno()).st_mode
    return [
        file.name,
        file.mode,
        file.encoding,
        file.errors,
        file.line_buffering,
        file.write_through,
        kind,
        repr(type(file)),
    ]


def death_signal():
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)
    return number.value


def files():
    folder = Path("/proc/self/fd")
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries)
    return [(name, os.get_inheritable(int(name))) for name in names if (folder / name).exists()]


def facts():
    own = threading.main_thread()
    return {
        "arguments": [sys.argv, sys.orig_argv, sys.executable, Path("/proc/self/cmdline").read_text()],
        "command": [Path("/proc/self/comm").read_text(), os.readlink("/proc/self/exe")],
        "path": sys.path,
        "folder": [os.getcwd(), os.umask(0o22)],
        "flags": [str(sys.flags), sys.warnoptions, sys._xoptions, sys.dont_write_bytecode, sys.pycache_prefix],
        "streams": [stream(sys.stdin), stream(sys.stdout), stream(sys.stderr), sys.__stdout__ is sys.stdout],
        "input": os.readlink("/proc/self/fd/0"),
        "files": files(),
        "signals": [str(signal.getsignal(number)) for number in signal.valid_signals()],
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "pending": sorted(signal.sigpending()),
        "death": death_signal(),
        "groups": [os.getpgrp() == os.getpgid(os.getppid()), os.getsid(0) == os.getsid(os.getppid())],
        "limits": [resource.getrlimit(number) for number in range(10)],
        "nice": [os.nice(0), sorted(os.sched_getaffinity(0)), Path("/proc/self/oom_score_adj").read_text()],
        "threads": [threading.active_count(), len(os.listdir("/proc/self/task")), own.name],
        "main thread": [
            own is threading.current_thread(),
            own.ident == threading.get_ident(),
            own.native_id == os.getpid(),
        ],
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
        "exit handlers": atexit._ncallbacks(),
        "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, str(sys.gettrace())],
        "finders": [type(one).__name__ for one in sys.meta_path] + [one.__qualname__ for one in sys.path_hooks],
        "faults": faulthandler.is_enabled(),
        "warnings": [str(one) for one in warnings.filters],
        "garbage": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), len(gc.callbacks)],
        "interpreter": [sys.getrecursionlimit(), sys.getswitchinterval(), locale.setlocale(locale.LC_ALL)],
        "processes": [multiprocessing.get_start_method(allow_none=True), multiprocessing.get_all_start_methods()],
        "process": [multiprocessing.current_process().name, str(multiprocessing.parent_process())],
        "numpy": [str(np.geterr()), str(np.get_printoptions()), type(np.random.get_bit_generator()).__name__],
        "processor time": time.process_time() < 3600,
    }


def tell(place):
    """Write the facts of this process, its variables and its modules to a file."""
    modules = sorted({*sys.modules} - {"command_forker"})
    known = Path("/proc/self/environ").read_text().split("\0").count(f"TMPDIR={os.environ['TMPDIR']}")
    found = {**facts(), "variables": dict(os.environ), "modules": modules, "known to others": known}
    found["arguments"].pop()  # the command line that others see
    del found["garbage"][2]  # the number of frozen objects
    Path(place).write_text(json.dumps(found).replace(os.environ["TMPDIR"], "SCRATCH"))
