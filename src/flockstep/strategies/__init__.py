"""Strategies: when nodes exchange messages, with whom, what they send, and how the receiver applies the arrays. Each
family of strategies has one file.
"""
