"""Tables, figures and one self-contained HTML page from the records of runs."""
