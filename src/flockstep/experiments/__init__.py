"""Runs, comparisons and plans as functions with typed results: what the commands call, and what a notebook calls."""
