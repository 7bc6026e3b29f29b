"""The forward of 8-bit tensors on Hopper."""
