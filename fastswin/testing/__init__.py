"""What tests and benchmarks share: tolerances, poisoned allocation, ahead-of-time compilation."""
