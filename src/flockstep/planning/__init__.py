"""Plans: predicts the costs of a run, measures machines, gives advice, and compares predictions with runs."""
