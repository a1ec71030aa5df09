"""Pipeline schedules: the order in which each stage of a pipeline computes its passes."""
