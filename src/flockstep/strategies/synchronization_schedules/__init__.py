"""Periods: after how many local steps replicas are averaged."""
