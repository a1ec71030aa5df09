"""Models that are split into parts: the parts, the programs that compute them, and how torch modules are split."""
