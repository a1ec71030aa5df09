"""The systems of the literature as compositions of flockstep's components: names, citations and strategies, without
separate code.
"""
