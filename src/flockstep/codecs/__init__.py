"""Codecs: array → bytes → array, with a wire size that is known in advance."""
