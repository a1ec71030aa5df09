"""The built-in training jobs, and methods of splitting their data over workers."""
