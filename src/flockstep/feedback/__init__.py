"""Feedback, which keeps the values that a codec has dropped so that they can be sent later."""
