"""Runs, comparisons and plans as functions with typed results, for the commands and for notebooks."""
