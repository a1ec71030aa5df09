"""The command line of flockstep."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; an error prints one sentence on standard error, and sets the exit code."""
    from flockstep.cli.app import run

    sys.exit(run(sys.argv[1:]))
