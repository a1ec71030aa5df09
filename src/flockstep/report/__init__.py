"""Reports: tables, figures and one self-contained HTML page, made from the records of runs."""
