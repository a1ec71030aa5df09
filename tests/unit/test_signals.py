"""Processes of a run ignore the signals that stop a run, and can still end the processes that they start."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import multiprocessing, os, signal, subprocess, sys, time
from flockstep.runtime.signals import ENDING, STOPS, leave_to_supervisor

def rest(begun):
    begun.set()
    time.sleep(100)

signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
os.kill(os.getpid(), signal.SIGTERM)  # before the process ignores the signal
leave_to_supervisor()
for one in STOPS:
    os.kill(os.getpid(), one)
context = multiprocessing.get_context("fork")
begun = context.Event()
child = context.Process(target=rest, args=(begun,))
child.start()
begun.wait()
child.terminate()
child.join(50)
def default():
    os._exit(0 if all(signal.getsignal(one) == signal.SIG_DFL for one in ENDING) else 1)

plain = context.Process(target=default)  # a handler in Python would not end a process that a system call has just begun
plain.start()
plain.join(50)
program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
program.terminate()
print(child.exitcode, plain.exitcode, program.wait(50))
child.kill(), plain.kill(), program.kill()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals")
def test_a_process_of_a_run_ignores_signals_and_ends_its_own_processes() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=150, check=False)
    assert (ended.returncode, ended.stdout) == (0, "-15 0 -15\n"), ended.stderr
