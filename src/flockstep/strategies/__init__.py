"""Strategies: when nodes exchange, with whom, what they send, and how a node applies it. Each family of strategies has
one file.
"""
