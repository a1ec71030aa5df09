"""Codecs, which encode arrays as bytes and decode them; the size in bytes, or its upper bound, is known in advance."""
