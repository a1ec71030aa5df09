"""The shapes of well-known networks, without weights."""
