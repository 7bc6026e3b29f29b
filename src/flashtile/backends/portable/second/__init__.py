"""Second derivatives in Triton: the derivative of the backward in reverse mode."""
