"""The built-in training jobs, readers of training data, and methods of splitting data over workers."""
