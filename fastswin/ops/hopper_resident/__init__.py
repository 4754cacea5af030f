"""Products of narrow rows whose weights stay in shared memory, on Hopper."""
