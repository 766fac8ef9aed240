"""Several hosts on one machine: network namespaces, and a Ray cluster over them."""
