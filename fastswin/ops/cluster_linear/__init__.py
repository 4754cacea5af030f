"""Products of few rows on Hopper, K cut across the programs of a cluster."""
