"""What a worker leaves out of a push, and how it names what it leaves in."""
