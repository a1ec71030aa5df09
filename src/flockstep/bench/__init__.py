"""Benchmarks of flockstep's components against alternatives, taken in turns in one run on this machine."""
