"""Schedules: how learning rate and batch size change in the course of training."""

from flockstep.schedules.base import Extent, Schedule
from flockstep.schedules.timetable import Timetable

__all__ = ["Extent", "Schedule", "Timetable"]
