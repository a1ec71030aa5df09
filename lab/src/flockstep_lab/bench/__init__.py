"""Benchmarks of flockstep's components against alternatives, which are measured in turns on this machine."""
