"""Numerical building blocks. Each Triton kernel has a plain PyTorch twin here: CPUs run it, tests compare the two."""
