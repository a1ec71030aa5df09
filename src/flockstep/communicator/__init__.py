"""The public communicator: named arrays from any rank to any other, requests, windows, collectives, from any thread."""
