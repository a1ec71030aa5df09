"""When to exchange, with whom, what, and how the result is applied: one family a file."""
