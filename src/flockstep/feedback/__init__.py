"""What a sender keeps of what its codec dropped."""
