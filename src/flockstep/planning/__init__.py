"""Before a run: what it will cost, measured machines, advice; and afterwards, whether that was right."""
