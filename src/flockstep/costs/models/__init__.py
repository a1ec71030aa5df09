"""Well-known networks by shape only; none has weights."""
