"""Drivers, which run a strategy's programs: in the user's loop, in separate processes, or in virtual time."""
