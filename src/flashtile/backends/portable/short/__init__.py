"""The backward of packed sequences that fit one tile, in one launch."""
