"""Plans: predict the cost of training with each strategy, measure machines, recommend a strategy, and compare
predictions with runs.
"""
