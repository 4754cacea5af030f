"""The MLP half of a block in one launch: a cluster's programs share the hidden units."""
