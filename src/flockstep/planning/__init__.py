"""Plans: predicted costs of a run, measurement of machines, advice, and the comparison of predictions with runs."""
