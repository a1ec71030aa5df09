"""Feedback: what a sender keeps of the values that its codec dropped."""
