"""Synchronization schedules: after how many local steps replicas are averaged."""
