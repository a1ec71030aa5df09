"""Runs a module as `python -m` does; the command is python module_entry.py MODULE [ARGUMENT …]."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path.cwd())  # not this file's folder, whose modules would hide others
    import runpy

    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
