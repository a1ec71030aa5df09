"""Runs the command line: `python -m flockstep` is the command `flockstep`."""

from flockstep.cli import main

main()
