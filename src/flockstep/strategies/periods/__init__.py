"""When replicas meet."""
