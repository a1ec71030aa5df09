"""How learning rate and batch change in the course of training."""
