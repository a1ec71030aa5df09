"""Runs the flockstep command line as `python -m flockstep`."""

from flockstep.cli import main

main()
