"""The systems of the literature, as compositions: names, citations and strategies, no logic of their own."""
