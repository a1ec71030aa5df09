"""Random disruptions of real runs, and the invariants that are checked afterwards."""
