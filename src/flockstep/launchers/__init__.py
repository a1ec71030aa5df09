"""Starting a script or a job on many workers."""
