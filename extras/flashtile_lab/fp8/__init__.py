"""What 8 bits cost in exactness: errors measured, and the kernels' roundings in plain PyTorch."""
