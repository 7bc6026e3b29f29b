"""The forward over 8-bit tensors."""
