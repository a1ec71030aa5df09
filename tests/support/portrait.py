"""A script that writes all that it can see of its process; it begins with the imports that a preload may do for it."""

import numpy as np
import torch
from torch import nn

import flockstep  # noqa: F401 - imported as users' scripts import it

# what follows may be imported last, and a portrait is printed as a script would
# ruff: noqa: E402, T201, PTH109, PTH115, PTH208, NPY002
MODULES = None
import sys

MODULES = sorted(sys.modules)
PATHS = sorted(sys.path_importer_cache)
import atexit
import ctypes
import faulthandler
import gc
import inspect
import json
import locale
import multiprocessing
import os
import random
import resource
import signal
import threading
import time
import traceback
import warnings
from pathlib import Path


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


def failure():
    try:
        nn.Linear(2, 2)(torch.ones(3))
    except RuntimeError:
        return traceback.format_exc()


def death_signal():
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)
    return number.value


def variables():
    changed = {"RANK": int, "LOCAL_RANK": int, "FLOCKSTEP_NODE_SPEC": lambda text: sorted(json.loads(text))}
    return [[name, str(changed.get(name, str)(value))] for name, value in os.environ.items()]


def files():
    folder = Path("/proc/self/fd")
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries)
    return [(name, os.get_inheritable(int(name))) for name in names if (folder / name).exists()]


def seen():
    spec = json.loads(os.environ["FLOCKSTEP_NODE_SPEC"])
    own = threading.main_thread()
    return {
        "arguments": [sys.argv, sys.orig_argv, sys.executable, Path("/proc/self/cmdline").read_text()],
        "command": [Path("/proc/self/comm").read_text(), os.readlink("/proc/self/exe")],
        "path": sys.path,
        "main": [__name__, __file__, repr(__spec__), type(__loader__).__name__, __package__, sorted(globals())],
        "is main": sys.modules["__main__"].__dict__ is globals(),
        "folder": [os.getcwd(), os.umask(0o22)],
        "environment": variables(),
        "process of the run": [spec["process"] == os.getpid(), spec["address"] == int(os.environ["RANK"])],
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
        "modules": MODULES,
        "searched": PATHS,
        "frames": [frame.function for frame in inspect.stack()],
        "failure": failure(),
        "faults": faulthandler.is_enabled(),
        "warnings": [str(one) for one in warnings.filters],
        "garbage": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), len(gc.callbacks)],
        "interpreter": [sys.getrecursionlimit(), sys.getswitchinterval(), locale.setlocale(locale.LC_ALL)],
        "processes": [multiprocessing.get_start_method(allow_none=True), multiprocessing.get_all_start_methods()],
        "process": [multiprocessing.current_process().name, str(multiprocessing.parent_process())],
        "torch": [torch.get_num_threads(), torch.get_num_interop_threads(), str(torch.get_default_dtype())],
        "cuda": [torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()],
        "modes": [
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.multiprocessing.get_sharing_strategy(),
        ],
        "numpy": [str(np.geterr()), str(np.get_printoptions()), type(np.random.get_bit_generator()).__name__],
        "sums": [float(torch.arange(1000).float().sin().sum()), float(np.sin(np.arange(1000)).sum())],
        "processor time": time.process_time() < 3600,
    }


def drawn():
    """What differs from worker to worker."""
    authkey = bytes(multiprocessing.current_process().authkey).hex()
    seeds = np.random.get_bit_generator().seed_seq.entropy
    return [
        random.random(),
        np.random.rand(),
        torch.rand(1).item(),
        torch.initial_seed(),
        authkey,
        str(seeds),
        os.getpid(),
    ]


def square(number):
    return number * number


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    portrait = {"seen": seen(), "drawn": drawn(), "parent": os.getppid()}
    if "pools" in sys.argv:
        pools = [multiprocessing.get_context(method).Pool(1) for method in ("fork", "spawn", "forkserver")]
        portrait["pools"] = [pool.map(square, range(3)) for pool in pools]
        for pool in pools:
            pool.close()
            pool.join()
        with torch.no_grad():
            torch.set_num_threads(2)
            portrait["product"] = float((torch.ones(600, 600) @ torch.ones(600, 600)).sum())
    atexit.register(lambda: (folder / f"end-{os.environ['RANK']}").touch())
    (folder / f"portrait-{os.environ['RANK']}").write_text(json.dumps(portrait))
    print("to the output")
    if os.environ["RANK"] == "1":
        raise ValueError("the end")
