"""Sealed jobs: training programs that travel without their source, and the results that come back."""
