"""Moving messages between two nodes."""
