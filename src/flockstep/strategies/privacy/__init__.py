"""What the model tells of a single client."""
