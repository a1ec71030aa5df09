"""The command line of flockstep."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; errors end in one sentence on standard error and an exit code, no traceback."""
    from flockstep.cli.app import run

    sys.exit(run(sys.argv[1:]))
