"""The published systems, as data: a citation and a composition."""
