"""The systems of the literature as compositions: names, citations and strategies, without separate code."""
