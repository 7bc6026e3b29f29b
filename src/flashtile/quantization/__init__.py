"""8-bit attention: quantised tensors, how they are made, and the forward that takes them."""
