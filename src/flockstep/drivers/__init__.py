"""What runs a strategy's programs: the user's loop, a process of its own, virtual time."""
