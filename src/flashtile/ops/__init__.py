"""The operators that PyTorch sees, their derivatives, and the choice of a backend."""
