"""A whole Swin block in one kernel: both halves of every window on chip, for inference."""
