"""The public communicator: named arrays between any ranks, requests, windows and collectives, from any thread."""
