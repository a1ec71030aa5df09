"""flockstep-lab: the evidence for flockstep. Published results to reproduce, benchmarks, chaos campaigns, generators of
damage and faults, and hosts that are network namespaces of one machine.
"""
