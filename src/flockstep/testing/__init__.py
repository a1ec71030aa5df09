"""Conformance checks for components, both flockstep's own and custom components."""
