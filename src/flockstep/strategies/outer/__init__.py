"""What is made of the mean of the replicas."""
