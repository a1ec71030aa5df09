"""Algorithms written from their papers alone, to compare the library's implementations with."""
