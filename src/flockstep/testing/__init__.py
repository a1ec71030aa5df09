"""Conformance checks for components, flockstep's own and custom ones."""
