"""Published results, and what flockstep makes of them."""
