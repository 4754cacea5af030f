"""The MLP half of a block in one launch: rows stay on a multiprocessor, weights stream past."""
