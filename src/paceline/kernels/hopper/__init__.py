"""Matmuls for a few rows at the speed of memory, tuned on Hopper. The rest of the package reads without them."""
