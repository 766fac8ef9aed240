"""Numerical building blocks. Each Triton kernel has a reference here in plain PyTorch: CPUs run it, tests compare the
two."""
