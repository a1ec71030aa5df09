"""Which parameters are averaged where only a few are."""
