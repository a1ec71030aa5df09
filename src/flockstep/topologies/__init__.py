"""Topologies: which workers exchange with each other, as graphs and mixing matrices."""
