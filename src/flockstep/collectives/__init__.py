"""Collectives: many-to-many exchanges over point-to-point messages."""
