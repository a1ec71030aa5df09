"""The commands that flockstep-lab adds to flockstep: reproduce, bench and chaos."""
