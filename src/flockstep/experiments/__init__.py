"""Functions that run, compare and plan trainings, with typed results; commands and notebooks use them."""
