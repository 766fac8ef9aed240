"""Matmuls of a few rows at the speed of memory, and what follows them in a layer, tuned on Hopper (H200). The rest of
the package reads without them."""
