"""Synchronization schedules, which decide after how many local steps replicas are averaged."""
