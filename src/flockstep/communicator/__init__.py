"""The public communicator: exchange of named arrays between any ranks, from any thread, by messages, requests, windows
and collectives.
"""
