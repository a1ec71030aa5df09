"""Tables, figures and one self-contained HTML page from the records of runs."""

from flockstep.report.html import render, write_report
from flockstep.report.ranking import labels, rank
from flockstep.report.table import table

__all__ = ["labels", "rank", "render", "table", "write_report"]
