"""Starts a user's script in a process that ends with its launcher: python -I -S script_entry.py LAUNCHER SCRIPT
[ARGUMENT …].

This file is executed directly and imports only the standard library, because its start delays the script.
"""

import json
import os
import signal
import sys

NODE_SPEC = "FLOCKSTEP_NODE_SPEC"
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def main(launcher: int, command: list[str]) -> None:
    """Replace this process, a child of process `launcher`, with a Python interpreter that runs `command`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the launcher, which ends the run in order
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:
        sys.exit("the process that launched this script has ended")
    if NODE_SPEC in os.environ:  # otherwise the process forks the workers, see script_forker.py
        node_spec = json.loads(os.environ[NODE_SPEC])
        secret = os.dup(node_spec["descriptor"])  # the first free number, as in a script that is forked
        os.close(node_spec["descriptor"])
        os.set_inheritable(secret, True)
        os.environ[NODE_SPEC] = json.dumps({**node_spec, "process": os.getpid(), "descriptor": secret})
    os.execv(sys.executable, [sys.executable, *command])  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
